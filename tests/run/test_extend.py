"""`lrlab extend`: a longer run and a cool-down have the bits of a run with that curve from its start."""

import json
import shutil
import signal

import numpy as np
import pytest
import runs
from continued_runs import applied_is, assert_same_end, from_the_start, new_run

from diffusers_lrlab import extend
from diffusers_lrlab.core.errors import Interrupted, LabError
from diffusers_lrlab.core.manifest import write_manifest
from diffusers_lrlab.training.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trunk(folder):
    """Its rotation keeps one checkpoint, and `keep_every` those to cool down from."""
    return new_run(folder, "trunk", "constant_with_warmup", checkpoints_total_limit=1, keep_every=8)


@pytest.fixture(scope="module")
def cosine(folder):
    return new_run(folder, "cosine", "cosine:min_lr_ratio=0.05")


@pytest.mark.slow
def test_a_constant_rate_goes_on(trunk, capsys):
    before = sorted((path.relative_to(trunk), path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    extended = extend(trunk, 30)
    out = capsys.readouterr().out
    assert "a run with 'constant_with_warmup' over 30 updates from its start, to the bit" in out
    assert "0.0003 first (update 20), 0.0003 highest (update 20), 0.0003 last (update 29)" in out
    assert extended == trunk.with_name("trunk-30")
    assert_same_end(from_the_start(extended), extended, 30)
    parent = runs.read_record(extended)["run"]["parent"]
    assert (parent["folder"], parent["update"], parent["num_updates"]) == (str(trunk), 20, 20)
    assert parent["git_commit"] == runs.read_record(trunk)["meta"]["git_commit"]
    assert "The run started from update 20 of `trunk`" in (extended / "README.md").read_text()
    # The run that it goes on from is as it was, and the same command says that all is done.
    assert before == sorted((path.relative_to(trunk), path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    assert extend(trunk, 30) == extended
    assert "Resumed" not in capsys.readouterr().out


@pytest.mark.slow
def test_it_goes_on_from_before_the_decay(folder, capsys):
    """The decay of the longer run begins later, so that a part of the work is done again."""
    extended = extend(new_run(folder, "wsd", "wsd:num_decay_steps=8"), 30)
    assert "checkpoint-10 of" in capsys.readouterr().out
    assert_same_end(from_the_start(extended), extended, 30)


@pytest.mark.slow
def test_a_plateau_is_cooled_down(trunk, folder, capsys):
    for at, num in ((8, 2), (16, 4)):
        run = extend(trunk, at=at, cooldown=num, decay="linear")
        assert run == folder / f"trunk-{at + num}"
        assert "a run with 'warmup_stable_decay:num_decay_steps=" in capsys.readouterr().out
        assert_same_end(from_the_start(run), run, at + num)
        assert applied_is(run, 3e-4 * np.concatenate([[0], np.ones(at - 1), 1 - np.arange(num) / num]))
        assert runs.read_record(run)["run"]["parent"]["update"] == at


@pytest.mark.slow
def test_a_run_with_a_decay_of_its_own_is_cooled_down_earlier(folder):
    """With the shape of its own decay; not once that has begun."""
    trunk = new_run(folder, "own-decay", "wsd:num_decay_steps=9,decay_type=exponential,min_lr_ratio=0.1")
    run = extend(trunk, at=10, cooldown=3)
    assert extend(trunk, at=10, cooldown=3) == run
    for other in ({"cooldown": 4}, {"cooldown": 3, "decay": "linear"}):
        with pytest.raises(LabError, match="holds something else"):
            extend(trunk, at=10, output_dir=run, **other)
    assert runs.read_record(run)["config"]["lr_scheduler_kwargs"]["decay_type"] == "exponential"
    assert_same_end(from_the_start(run), run, 13)
    with pytest.raises(LabError, match=r"--at 15: must be on the plateau of a constant or a warmup_stable_decay"):
        extend(trunk, at=15, cooldown=3)


REFUSED = [
    ({"max_train_steps": 40, "at": 8}, "needs either --max_train_steps N, or --at UPDATE --cooldown M"),
    ({"max_train_steps": 40, "cooldown": 8}, "--cooldown and --decay have no effect without --at"),
    ({"max_train_steps": 20}, "--max_train_steps 20: must be more than 20, got 20"),
    ({"max_train_steps": 40, "output_dir": "trunk"}, "--out 'trunk' holds something else"),
    ({"at": 8}, "--cooldown 0: must be a whole number in [1, 1e9]"),
    ({"at": 9, "cooldown": 4}, "--at 9: must be the update of a checkpoint of the run (8, 16, 20), got 9"),
    ({"at": 8, "cooldown": 4, "decay": "cubic"}, "--decay 'cubic': must be one of linear,"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(trunk, arguments, message, monkeypatch):
    monkeypatch.chdir(trunk.parent)
    with pytest.raises(LabError) as error:
        extend(trunk, **arguments)
    assert message in str(error.value)


def test_a_schedule_that_depends_on_the_length_is_not_extended(cosine, folder):
    with pytest.raises(LabError, match="depend on the length of the run, and agree only up to update 2; the oldest"):
        extend(cosine, 40)
    with pytest.raises(LabError, match=r"--at 10: must be on the plateau .* got 'cosine:min_lr_ratio=0.05' at 0.6"):
        extend(cosine, at=10, cooldown=4)
    assert not (folder / "cosine-40").exists()


def test_what_one_cools_down_from_is_kept(trunk):
    kept = {path.name for path in trunk.glob("checkpoint-*")}
    assert kept == {"checkpoint-8", "checkpoint-16", "checkpoint-20"}


@pytest.mark.slow
def test_refused_before_anything_is_written(folder, trunk, cosine):
    """No checkpoint, a feedback schedule, a curriculum, another version, several processes, another folder's run."""
    bare = folder / "bare"
    shutil.copytree(trunk, bare, ignore=shutil.ignore_patterns("checkpoint-*"))
    plateau = new_run(folder, "plateau", "reduce_lr_on_plateau")
    moving = new_run(folder, "moving", "constant", timestep_sampler="clts")
    newer, several = (shutil.copytree(trunk, folder / name) for name in ("newer", "several"))
    for copy, more in ((newer, {"unheard_of": 1}), (several, {})):
        for file in copy.glob("checkpoint-*/trainer.json"):
            state = json.loads(file.read_text())
            state |= {"config": state["config"] | more, "num_processes": 1 if more else 2}
            file.write_text(json.dumps(state))
            (file.parent / "manifest.json").unlink()
            write_manifest(file.parent)
    cases = {
        bare: "has no checkpoint",
        plateau: "follows the validation loss",
        moving: "its curriculum follows the length of the run",
        newer: "has 'unheard_of', which this version does not know",
        several: "was trained by 2 processes",
        folder / "nowhere": "must be the folder of a run",
    }
    for run, message in cases.items():
        with pytest.raises(LabError) as error:
            extend(run, 40)
        assert message in str(error.value), run
        assert not run.with_name(f"{run.name}-40").exists()
    with pytest.raises(LabError, match=f"got a name that no folder has. Hint: Did you mean '{trunk}'"):
        extend(trunk.with_name("trink"), 40)


@pytest.mark.slow
def test_a_stopped_extension_is_continued_by_the_same_command(folder, trunk, monkeypatch):
    stopped = folder / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_at_boundary", lambda trainer: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted, match=r"Stopped by SIGTERM .* To go on, give the same command again \(.*21\)\.$"):
            extend(trunk, 30, output_dir=stopped)
    assert runs.read_record(stopped)["run"]["status"] == "cancelled"
    assert extend(trunk, 30, output_dir=stopped) == stopped
    assert_same_end(extend(trunk, 30), stopped, 30)
