"""`lrlab branch`: a cool-down from a checkpoint has the bits of the run that had it in its schedule from the start."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import runs
import torch
from continued_runs import SMALL, applied_is, assert_same_end, from_the_start, new_run

from diffusers_lrlab import branch
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.hub.rerun import repeated_options
from diffusers_lrlab.run.branch import _command, parse_changes
from diffusers_lrlab.run.child import Child
from diffusers_lrlab.run.parent import read_parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    (path / "model.json").write_text(json.dumps(SMALL))
    return path


@pytest.fixture(scope="module")
def trunk(folder):
    """Its rotation keeps one checkpoint, and `keep_every` those to branch from."""
    return new_run(folder, "trunk", "constant_with_warmup", checkpoints_total_limit=1, keep_every=8)


def test_kept_apart_from_the_rotation(trunk):
    kept = {path.name for path in trunk.glob("checkpoint-*")}
    assert kept == {"checkpoint-8", "checkpoint-16", "checkpoint-20"}


@pytest.mark.slow
def test_equal_to_the_run_with_that_cooldown_from_the_start(trunk, capsys):
    branches = branch(trunk, "8,16", 0.2, decay="linear")
    names = ["at-8-cooldown-2", "at-16-cooldown-4"]
    assert branches == [trunk.with_name("trunk-branches") / name for name in names]
    assert (
        "identical to the bit to a run with 'warmup_stable_decay:num_decay_steps=2.0,decay_type=linear'"
        in capsys.readouterr().out
    )
    for run, at, num in zip(branches, (8, 16), (2, 4), strict=True):
        assert_same_end(from_the_start(run), run, at + num)
        assert applied_is(run, 3e-4 * np.concatenate([[0], np.ones(at - 1), 1 - np.arange(num) / num]))
        record = runs.read_record(run)
        assert record["config"]["lr_scheduler"] == "warmup_stable_decay"
        parent = record["run"]["parent"]
        assert (parent["folder"], parent["update"], parent["how"]) == (str(trunk), at, "branched")
        assert parent["git_commit"] == runs.read_record(trunk)["meta"]["git_commit"]


@pytest.mark.slow
def test_a_trunk_with_a_decay_of_its_own(folder):
    """A WSD is branched before its decay, which is where it was to begin, and not after."""
    trunk = new_run(folder, "wsd", "wsd:num_decay_steps=9,decay_type=exponential,min_lr_ratio=0.1")
    (run,) = branch(trunk, 10, 3)
    assert runs.read_record(run)["config"]["lr_scheduler_kwargs"]["decay_type"] == "exponential"
    assert_same_end(from_the_start(run), run, 13)
    with pytest.raises(LabError, match=r"--at 15: must be on a plateau .* its last update of a plateau is 12"):
        branch(trunk, 15, 3)


def test_a_plateau_below_the_peak(folder):
    trunk = new_run(folder, "steps", 'piecewise_constant:{"step_rules": "1:7,0.5"}')
    (run,) = branch(trunk, "latest", 5, decay="linear")
    assert applied_is(run, 3e-4 * np.concatenate([np.ones(7), np.full(13, 0.5), 0.5 * (1 - np.arange(5) / 5)]))


def test_other_settings_of_the_optimizer(trunk, folder, capsys):
    (plain,) = branch(trunk, 16, 4, output_dir=folder / "plain")
    (run,) = branch(trunk, 16, 4, optimizer_kwargs=parse_changes("beta2=0.9,weight_decay=0"), output_dir=folder / "with")
    assert "beta2 0.999 -> 0.9, weight_decay 1e-06 -> 0.0" in capsys.readouterr().out
    group = torch.load(run / "checkpoint-20" / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert (group["betas"], group["weight_decay"]) == ((0.95, 0.9), 0)
    losses = [runs.read_metrics(each)[0] for each in (plain, run)]
    assert [row["loss"] for row in losses[0]][:8] == [row["loss"] for row in losses[1]][:8]
    assert losses[0][-1]["loss"] != losses[1][-1]["loss"]
    assert runs.read_record(run)["run"]["parent"]["changed"] == {"beta2": [0.999, 0.9], "weight_decay": [1e-6, 0.0]}
    with pytest.raises(LabError, match="was branched with other settings of the optimizer"):
        repeated_options(run)
    assert repeated_options(run, trains=False)["adam_beta2"] == 0.9  # enough for its data and model
    assert branch(trunk, 16, 4, optimizer_kwargs={"beta2": 0.9, "weight_decay": 0.0}, output_dir=folder / "with") == [run]
    with pytest.raises(LabError, match="holds another run, branched from update 16"):
        branch(trunk, 16, 4, output_dir=folder / "with")


def test_settings_in_images(trunk, folder, capsys):
    """In place of those that the trunk has, for the images of its updates."""
    half_life = {"beta2_half_life": 2000.0, "tau": 1000.0}
    (run,) = branch(trunk, 16, 4, optimizer_kwargs=half_life, output_dir=folder / "images")
    assert "beta2_half_life None -> 2000.0, tau None -> 1000.0" in capsys.readouterr().out
    record = runs.read_record(run)
    images, lr = record["train"]["global_batch"], record["train"]["peak_learning_rate"]
    group = torch.load(run / "checkpoint-20" / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert group["betas"] == (0.95, 0.5 ** (images / 2000))
    assert group["weight_decay"] == pytest.approx(images / (1000 * lr), rel=1e-12)
    assert "beta2" not in record["config"]["optimizer_kwargs"]
    assert record["train"]["timescales"]["tau"] == pytest.approx(1000)
    trunk = new_run(
        folder, "lives", "constant_with_warmup", 10, optimizer="adamw:beta2_half_life=2000", adam_weight_decay=0.1
    )
    (back,) = branch(trunk, 10, 2, optimizer_kwargs={"beta2": 0.9, "tau": 1000.0}, output_dir=folder / "back")
    group = torch.load(back / "checkpoint-12" / "optimizer.bin", weights_only=True)["param_groups"][0]
    assert group["betas"] == (0.95, 0.9)
    assert group["weight_decay"] == pytest.approx(images / (1000 * lr), rel=1e-12)


REFUSED = [
    ({"optimizer_kwargs": {"cautious": True}}, "--with cautious is not a setting that 'adamw' can change during a run"),
    ({"at": "7"}, "--at 7: must be the update of a checkpoint of the run (8, 16, 20)"),
    ({"at": "soon"}, "--at 'soon': must be UPDATE, latest or UPDATE,UPDATE,..."),
    ({"at": [], "cooldown": 3}, "--at []: must be"),
    ({"cooldown": 0.0}, "--cooldown 0.0: must be"),
    ({"cooldown": 3.5}, "--cooldown 3.5: must be a whole number of updates, or a fraction in (0, 1)"),
    ({"decay": "1-cube"}, "--decay '1-cube': must be one of linear, cosine, exponential, 1-sqrt"),
    ({"optimizer_kwargs": {"beta3": 0.5}}, "'adamw' does not take 'beta3'"),
    ({"optimizer_kwargs": {"beta2": 0.999}}, "--with beta2 changes nothing"),
    ({"workers": 0}, "--workers 0: must be"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(trunk, arguments, message):
    before = {*trunk.parent.rglob("*")}
    with pytest.raises(LabError) as error:
        branch(trunk, **{"at": "latest", "cooldown": 4, **arguments})
    assert message in str(error.value)
    assert {*trunk.parent.rglob("*")} == before


def test_a_dry_run_leaves_a_half_made_folder_alone(trunk, folder, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    asked = {"at": 16, "cooldown": 4, "output_dir": folder / "half-made"}
    with monkeypatch.context() as patch:
        patch.setattr("diffusers_lrlab.run.child.hand_over", killed)
        with pytest.raises(KeyboardInterrupt):
            branch(trunk, **asked)
    before = {file: file.read_bytes() for file in asked["output_dir"].rglob("*") if file.is_file()}
    branch(trunk, **asked, dry_run=True)
    assert {file: file.read_bytes() for file in asked["output_dir"].rglob("*") if file.is_file()} == before
    (run,) = branch(trunk, **asked)
    assert runs.read_record(run)["run"]["status"] == "finished"


def test_refused_for_schedules_without_a_plateau(folder):
    cosine = new_run(folder, "cosine", "cosine", 10)
    with pytest.raises(LabError, match="it has no plateau"):
        branch(cosine, 5, 5)
    plateau = new_run(folder, "plateau", "reduce_lr_on_plateau", 10)
    with pytest.raises(LabError, match="follows the validation loss"):
        branch(plateau, 5, 5)
    warm = new_run(folder, "warm", "constant_with_warmup", 10, lr_warmup_steps=6.0)
    with pytest.raises(LabError, match="its warm-up lasts until update 6"):
        branch(warm, 5, 5)


def test_what_is_asked_for_beside_the_optimizer():
    assert parse_changes(None) == {}
    assert parse_changes("beta2=0.9995") == {"beta2": 0.9995}
    for text in ("", "beta2"):
        with pytest.raises(LabError, match=f"--with '{text}': must be key=value,key=value"):
            parse_changes(text)
    with pytest.raises(LabError, match="Cannot read the spec string"):
        parse_changes("beta2=0.9,weight_decay")


def test_muon_has_settings_for_vectors_too(folder):
    trunk = new_run(folder, "muon", "constant_with_warmup", 10, optimizer="muon")
    (run,) = branch(trunk, 5, 2, optimizer_kwargs={"beta2": 0.9})
    groups = torch.load(run / "checkpoint-7" / "optimizer.bin", weights_only=True)["param_groups"]
    assert [group["betas"] for group in groups if "betas" in group] == [(0.9, 0.9)]
    assert runs.read_record(run)["run"]["parent"]["changed"] == {"beta2": [0.999, 0.9]}
    with pytest.raises(LabError, match="--with adamw is not a setting that 'muon' can change during a run"):
        branch(trunk, 5, 3, optimizer_kwargs={"adamw": ["*"]})


def test_workers_load_the_same_plugins(trunk, monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.run.branch.loaded_plugins", lambda: [{"name": "mine.py"}, {"name": "yours"}])
    child = Child(parent := read_parent(trunk), 8, parent.curve, trunk.with_name("other"), "branched")
    assert _command(child, "linear")[-2:] == ["--import", "mine.py,yours"]


@pytest.mark.slow
def test_several_at_once(trunk, folder, monkeypatch):
    """Two branches in processes of their own have the bits of branches one after another."""
    one_by_one = branch(trunk, [8, 16], 10, output_dir=folder / "one-by-one")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    at_once = branch(trunk, [8, 16], 10, output_dir=folder / "at-once", workers=2)
    for run, other, at in zip(one_by_one, at_once, (8, 16), strict=True):
        assert_same_end(run, other, at + 10)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_several_at_once_on_ray(trunk, folder, monkeypatch, capsys):
    import ray

    one_by_one = branch(trunk, [8, 16], 10, output_dir=folder / "before-ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        on_ray = branch(trunk, [8, 16], 10, output_dir=folder / "on-ray", workers=2, address="auto")
        assert capsys.readouterr().out.count("the rate of update") == 4  # of the first two, and what the tasks printed
        (folder / "taken").mkdir()
        (folder / "taken" / "at-8-cooldown-5").write_text("a file in the way")
        with pytest.raises(LabError, match="1 branch did not finish"):
            branch(trunk, [8], 5, output_dir=folder / "taken", address="auto")
    finally:
        ray.shutdown()
    for run, other, at in zip(one_by_one, on_ray, (8, 16), strict=True):
        assert_same_end(run, other, at + 10)


def test_ray_is_needed_for_its_address(trunk, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match="--address needs ray, not installed here"):
        branch(trunk, 8, 4, address="auto")
