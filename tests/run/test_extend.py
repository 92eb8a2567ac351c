"""`lrlab extend`: the curve that was announced, and the bits of a run that was that long from its start."""

import json
import shutil
import signal

import numpy as np
import pytest
import runs
import started
from continued_runs import SMALL, applied_is, assert_same_end, from_the_start, logged_rates, new_run

from diffusers_lrlab import extend
from diffusers_lrlab.core.errors import Interrupted, LabError
from diffusers_lrlab.core.manifest import MANIFEST, write_manifest
from diffusers_lrlab.schedules.continued import RunCurve
from diffusers_lrlab.schedules.resolve import resolve_schedule
from diffusers_lrlab.training.trainer import Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    (path / "model.json").write_text(json.dumps(SMALL))
    return path


@pytest.fixture(scope="module")
def trunk(folder):
    return new_run(folder, "trunk", "constant_with_warmup")


@pytest.fixture(scope="module")
def cosine(folder):
    return new_run(folder, "cosine", "cosine:min_lr_ratio=0.05")


@pytest.mark.slow
def test_a_constant_rate_goes_on(trunk, capsys):
    before = sorted((path.relative_to(trunk), path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    extended = extend(trunk, 30)
    out = capsys.readouterr().out
    assert "as if it had been that long from the start, to the bit" in out
    assert "0.0003 first (update 20), 0.0003 highest (update 20), 0.0003 last (update 29)" in out
    assert extended == trunk.with_name("trunk-30")
    assert_same_end(from_the_start(extended), extended, 30)
    parent = runs.read_record(extended)["run"]["parent"]
    assert (parent["update"], parent["num_updates"], parent["how"]) == (20, 20, "extended")
    assert "The run was extended at update 20 from `trunk`" in (extended / "README.md").read_text()
    # The run that it goes on from is as it was, and the same command says that all is done.
    assert before == sorted((path.relative_to(trunk), path.stat().st_mtime_ns) for path in trunk.rglob("*"))
    assert extend(trunk, 30) == extended
    assert "It is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_an_extended_run_goes_on_again(trunk):
    whole = from_the_start(extend(extend(trunk, 24), 28, output_dir=trunk.with_name("twice")))
    assert_same_end(whole, trunk.with_name("twice"), 28)
    parents = runs.read_record(trunk.with_name("twice"))["run"]["parent"]
    assert (parents["update"], parents["parent"]["update"]) == (24, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "start"), [("wsd:num_decay_steps=8", 10), ("join:schedules=[constant|cosine],boundaries=[12]", 10)]
)
def test_it_goes_on_from_before_the_decay(folder, capsys, schedule, start):
    """The decay of the longer run begins later, so that a part of the work is done again."""
    name = schedule.partition(":")[0]
    extended = extend(new_run(folder, name, schedule), 30)
    assert f"from its checkpoint-{start}" in capsys.readouterr().out
    assert_same_end(from_the_start(extended), extended, 30)


def test_a_cosine_that_has_ended_is_not_raised_unasked(cosine, folder):
    with pytest.raises(LabError) as error:
        extend(cosine, 40)
    text = str(error.value)
    assert "matches the rates of the run only up to update 2 " in text
    assert "oldest checkpoint is from update 5" in text
    assert "--rewarm" in text
    assert not (folder / "cosine-40").exists()


def test_the_factor_of_a_rollback_is_announced(trunk, folder, capsys):
    run = shutil.copytree(trunk, folder / "rolled-back")
    file = run / "checkpoint-20" / "trainer.json"
    rollback = {"diverged_at": 9, "back_to": 5, "lr_factor": 0.5, "reason": "The loss"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rollbacks": [rollback]}))
    (file.parent / MANIFEST).unlink()
    write_manifest(file.parent)
    extend(run, 30, dry_run=True)
    shown = capsys.readouterr().out
    assert "0.00015 first (update 20), 0.00015 highest (update 20), 0.00015 last (update 29); 0.00015 before" in shown
    assert "these rates are 0.5 times the schedule's, since the run went back to update 5" in shown
    assert "from the start, except for what its rollback changed" in shown
    assert "to the bit" not in shown


def test_no_error_names_a_way_that_is_refused_too(folder):
    """No other schedule can take over at the end of a long cosine, which has no plateau to branch from."""
    run = new_run(folder, "long-cosine", "cosine", 40, checkpoints_total_limit=1)
    for arguments in ({}, {"then": "linear"}):
        with pytest.raises(LabError) as error:
            extend(run, 80, **arguments)
        text = str(error.value)
        assert "--rewarm" in text
        assert "--then SPEC" not in text
        assert "or branch" not in text


def test_a_cosine_is_rewarmed_to_the_longer_one(cosine, capsys):
    extended = extend(cosine, 40, rewarm=4)
    record = runs.read_record(extended)
    peak = record["train"]["peak_learning_rate"]
    schedule = resolve_schedule("cosine:min_lr_ratio=0.05")
    short, long = (RunCurve(schedule, peak, None, 1, num).lrs for num in (20, 40))
    rise = np.interp(np.arange(4), [0, 4], [short[19], long[24]])
    assert applied_is(extended, np.concatenate([short, rise, long[24:]]))
    shown = capsys.readouterr().out
    assert f"re-warmed: over 4 updates from {short[19] / peak:.2g} to {long[24] / peak:.2g} of the peak" in shown
    assert f"{short[19]:.4g} first (update 20), {long[24]:.4g} highest (update 24), {long[39]:.4g} last (update 39)" in shown


def test_it_rewinds_to_where_both_lengths_agree(cosine, capsys):
    extended = extend(cosine, 22, tolerance=0.1)
    peak = runs.read_record(extended)["train"]["peak_learning_rate"]
    schedule = resolve_schedule("cosine:min_lr_ratio=0.05")
    short, long = (RunCurve(schedule, peak, None, 1, num).lrs for num in (20, 22))
    assert applied_is(extended, np.concatenate([short[:20], long[20:]])) or applied_is(
        extended, np.concatenate([short[:15], long[15:]])
    )
    assert "rewound: before update" in capsys.readouterr().out


def test_another_schedule_takes_over_without_a_jump(trunk, cosine):
    after = extend(trunk, 30, then="linear", output_dir=trunk.with_name("then"))
    rates = logged_rates(after)
    assert (rates[19], rates[21]) == (3e-4, pytest.approx(3e-4 * 0.9))
    assert applied_is(after, 3e-4 * np.concatenate([[0.0], np.ones(19), 1 - np.arange(10) / 10]))
    low = extend(cosine, 25, then="constant", output_dir=trunk.with_name("low"))
    rates = logged_rates(low)
    assert rates[21] == rates[24 - 1] == pytest.approx(rates[19], rel=1e-12)


def test_stopped_in_the_middle_it_takes_over_there(cosine, folder):
    stopped = folder / "stopped"
    shutil.copytree(cosine, stopped)
    for update in (15, 20):
        shutil.rmtree(stopped / f"checkpoint-{update}")
    schedule = resolve_schedule("cosine:min_lr_ratio=0.05")
    after = extend(stopped, 14, then="constant")
    peak = runs.read_record(after)["train"]["peak_learning_rate"]
    before = RunCurve(schedule, peak, None, 1, 20).lrs[:10]
    assert applied_is(after, np.concatenate([before, np.full(4, before[9])]))


REFUSED = [
    ({"max_train_steps": 20}, "--max_train_steps 20: must be more than 20, got 20"),
    ({"max_train_steps": 40, "rewarm": 5.0}, "--rewarm 5 has no effect"),
    ({"max_train_steps": 40, "rewarm": 5.0, "then": "cosine"}, "exclude each other"),
    ({"max_train_steps": 40, "then": "greedy"}, "this one follows a metric"),
    ({"max_train_steps": 40, "tolerance": 2.0}, "--tolerance 2.0: must be a number in [0, 1]"),
    ({"max_train_steps": 40, "output_dir": "."}, "holds other files and no run"),
    ({"max_train_steps": 40, "output_dir": "trunk"}, "--out 'trunk' already holds a run. Give another folder."),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(trunk, arguments, message, monkeypatch):
    if arguments.get("output_dir") == "trunk":
        monkeypatch.chdir(trunk.parent)
    with pytest.raises(LabError) as error:
        extend(trunk, **arguments)
    assert message in str(error.value)


@pytest.mark.slow
def test_refused_before_anything_is_written(folder, trunk, cosine):
    """No checkpoint, a feedback schedule, a curriculum, another version, several processes, another folder's run."""
    bare = folder / "bare"
    shutil.copytree(trunk, bare, ignore=shutil.ignore_patterns("checkpoint-*"))
    plateau = new_run(folder, "plateau", "reduce_lr_on_plateau")
    moving = new_run(folder, "moving", "constant", timestep_sampler="clts")
    newer = folder / "newer"
    shutil.copytree(trunk, newer)
    for file in newer.glob("checkpoint-*/trainer.json"):
        state = json.loads(file.read_text())
        state["config"]["unheard_of"] = 1
        file.write_text(json.dumps(state))
        (file.parent / "manifest.json").unlink()
        write_manifest(file.parent)
    several = folder / "several"
    shutil.copytree(trunk, several)
    for file in several.glob("checkpoint-*/trainer.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_processes": 2}))
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
    with pytest.raises(LabError, match="holds a run|already holds a run"):
        extend(trunk, 40, output_dir=cosine)


@pytest.mark.slow
def test_changed_data(folder, tmp_path, capsys):
    """The data of a folder have changed since; once they are back, the same command goes on."""
    from datasets import Dataset

    rows = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)

    def write(values):
        Dataset.from_dict({"x": values.tolist()}).to_parquet(tmp_path / "data" / "points.parquet")

    (tmp_path / "data").mkdir()
    write(rows)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    run = new_run(folder, "own", "constant", 10, dataset_name=str(tmp_path / "data"))
    write(rows + 1)
    with pytest.raises(LabError, match="The data of .* have changed since it was trained"):
        extend(run, 15)
    shutil.copytree(tmp_path / "copy", tmp_path / "data", dirs_exist_ok=True)
    assert_same_end(from_the_start(extend(run, 15)), folder / "own-15", 15)


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


@pytest.mark.slow
def test_killed_in_the_extension(folder, trunk):
    """SIGKILL in the extension; the same command goes on, to the same bits."""
    whole = extend(trunk, 400, output_dir=folder / "whole-400")
    killed = folder / "killed-400"
    command = ["-m", "diffusers_lrlab.cli.main", "extend", trunk, "--max_train_steps", "400", "--out", killed]
    process = started.Started(*map(str, command), env=runs.environment())
    runs.wait_for(lambda: (killed / "checkpoint-100").exists(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert runs.read_record(killed)["run"]["status"] == "running"
    status, out, error = started.run(*map(str, command), env=runs.environment())
    assert status == 0, error[-2000:]
    assert "Resumed at update" in out
    assert_same_end(whole, killed, 400)
