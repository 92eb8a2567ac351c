"""Runs that diverge: nothing that is not finite is saved, and skipped updates resume to the bit."""

import functools
import math
import shutil

import helpers
import pytest
import runs
import torch
from trainer_states import assert_same, state_of

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import Diverged, LabError
from diffusers_lrlab.study.spec.parts import read_fields
from diffusers_lrlab.training.checkpoints import find_nonfinite, remove_old_checkpoints
from diffusers_lrlab.training.combinations import check_launch
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer


def options(**more):
    small = {"dataset_name": "moons", "max_train_steps": 12, "train_batch_size": 32, "num_validation_images": 16}
    small |= {"logging_steps": 5, "checkpointing_steps": 3, "validation_steps": 6, "log_timestep_bins": 2}
    small |= {"ddpm_num_steps": 4, "num_inference_steps": 2, "save_images_epochs": 10**6}
    return {**small, "denoiser": "mlp:hidden_size=8,num_layers=1,embedding_size=4", **more}


def make_trainer(folder, bad=(), **more):
    """A trainer whose data are NaN at the updates `bad`."""
    trainer = helpers.make_trainer(folder, options(**more))
    do_update = trainer.do_update

    def poisoned(batch):
        return do_update(batch.map(lambda images: images * math.nan) if trainer.run.update in bad else batch)

    trainer.do_update = poisoned
    return trainer


def checkpoints(folder):
    return [path.name for path in RunFolder(folder).checkpoints()]


def command(folder, **more):
    more = {"eval_batch_size": 4, "distance_samples": 0, "output_dir": folder, **more}
    return [*(f"--{name}={value}" for name, value in options(**more).items()), "--no_preflight"]


# Far above what plain gradient descent bears on this loss.
HOT = {"optimizer": "sgd", "learning_rate": 8, "max_grad_norm": 0, "max_train_steps": 100}
HOT |= {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 60}  # so that it learns something before
HOT |= {"logging_steps": 50, "checkpointing_steps": 5, "validation_steps": 100}


def test_finite_checkpoints_are_not_displaced(tmp_path):
    """The log is read every 50 updates; three checkpoints that were not finite stood where finite ones had been."""
    error = runs.run(*command(tmp_path / "run", **HOT), expect=2)
    left = [tmp_path / "run" / name for name in checkpoints(tmp_path / "run")]
    assert left
    for checkpoint in left:
        assert all(value.isfinite().all() for value in runs.read_weights(checkpoint / "denoiser").values()), checkpoint
    assert f"The last checkpoint with finite weights is {left[-1]}." in error
    record = runs.read_record(tmp_path / "run")
    assert record["run"]["status"] == "failed"
    assert "training has diverged" in record["run"]["error"]
    assert f"is not finite around update {record['train']['updates_done']} " in error
    assert not (tmp_path / "run" / "model_index.json").exists()


def test_what_is_not_finite_is_named(tmp_path):
    """In weights, moving average and state of the optimizer; numbers that a 2-norm cannot hold are finite."""
    trainer = make_trainer(tmp_path)
    updates = trainer.updates(show_progress=False)
    next(updates)
    weights = next(iter(trainer.run.model.parameters())).data
    weights.view(-1)[0] = 3e38
    assert find_nonfinite(trainer.run) is None
    moment = next(iter(trainer.run.optimizer.state.values()))["exp_avg"]
    for part, tensor in (
        ("moving average", trainer.run.average.shadow_params[-1]),
        ("optimizer", moment),
        ("model", weights),
    ):
        before = tensor.clone()
        tensor.view(-1)[-1] = -math.inf
        assert find_nonfinite(trainer.run) == part
        with pytest.raises(Diverged, match=f"The {part} of the run is not finite around update 1 at learning rate"):
            trainer.save()
        tensor.copy_(before)
    assert checkpoints(tmp_path) == []
    assert find_nonfinite(trainer.run, loss=torch.tensor([1.0, math.nan])) == "loss"


@pytest.mark.parametrize(("limit", "expected"), [(1, [11]), (2, [9, 11]), (0, [0, 3, 6, 7, 9, 11])])
def test_which_checkpoints_are_kept(tmp_path, limit, expected):
    for update in (0, 3, 6, 7, 9, 11):
        (tmp_path / f"checkpoint-{update}").mkdir()
        (tmp_path / f"checkpoint-{update}" / "trainer.json").write_text("{}")
    config = TrainingConfig(**options(checkpoints_total_limit=limit), output_dir=str(tmp_path))
    remove_old_checkpoints(RunFolder(tmp_path), resolve_config(config))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{update}" for update in expected}


def skipped(trainer):
    return trainer.divergence.state_dict()["skipped_updates"]


def end_of(trainer):
    trainer.run.training_seconds = 0.0
    folder = trainer.folder
    return {
        **state_of(trainer),
        "skipped updates": skipped(trainer),
        "audit": trainer.run.audit.state_dict(),
        "log": folder.metrics_file.read_text(),
        "left": checkpoints(folder.path),
    }


# --- skipped updates ---------------------------------------------------------------------------------------------------


def test_a_bad_update_leaves_everything_but_the_clock(tmp_path):
    trainer = make_trainer(tmp_path, bad=(4,), skip_bad_updates=1, timestep_sampler="loss_second_moment")
    updates = trainer.updates(show_progress=False)
    while next(updates) < 4:
        pass
    before = state_of(trainer)
    next(updates)
    after = state_of(trainer)
    for part in ("model", "ema", "objective"):
        assert_same(after[part], before[part])
    assert_same(after["optimizer"]["state"], before["optimizer"]["state"])
    assert (trainer.run.update, skipped(trainer)) == (5, {"total": 1, "in_a_row": 1})
    list(updates)
    rows = [row for row in trainer.folder.read_metrics() if "loss" in row]
    assert [(row["update"], row.get("skipped_updates")) for row in rows] == [(4, 1), (9, 1), (11, 1)]
    assert trainer.run.audit.passed
    assert trainer.run.audit.num_updates == 12
    assert skipped(trainer) == {"total": 1, "in_a_row": 0}


def test_skipped_updates_are_resumed_to_the_bit(tmp_path):
    more = {"bad": (4, 5, 9), "skip_bad_updates": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    whole = make_trainer(tmp_path / "whole", **more)
    list(whole.updates(show_progress=False))
    for after in (5, 6, 10):
        stopped = make_trainer(tmp_path / str(after), **more)
        updates = stopped.updates(show_progress=False)
        for _ in range(after):
            next(updates)
        updates.close()
        resumed = make_trainer(tmp_path / str(after), **more)
        resumed.resume(resumed.folder.newest_checkpoint())
        list(resumed.updates(show_progress=False))
        assert_same(end_of(resumed) | {"left": checkpoints(tmp_path / "whole")}, end_of(whole))
    rows = whole.folder.read_metrics()
    assert [row["update"] for row in rows if "lr" in row and "loss" not in row] == [4, 5, 9]
    assert rows[-2]["skipped_updates"] == 3


def test_too_many_in_a_row(tmp_path):
    trainer = make_trainer(tmp_path, bad=(4, 5, 6), skip_bad_updates=2)
    with pytest.raises(Diverged, match="The gradients of 3 updates in a row are not finite around update 6"):
        list(trainer.updates(show_progress=False))
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]


def test_where_they_have_no_place():
    config = resolve_config(TrainingConfig(dataset_name="moons", skip_bad_updates=3, mixed_precision="fp16"))
    with pytest.raises(LabError, match="--skip_bad_updates 3 has no effect with fp16, whose loss scaling repeats"):
        check_launch(config)
    with pytest.raises(LabError, match="skip_bad_updates, which a study sets itself"):
        read_fields({"skip_bad_updates": 3}, "base")


def poison_one_process(update):
    """Called in each process, first: one of two sees data that are NaN."""
    import os

    do_update = Trainer.do_update

    def poisoned(trainer, batch):
        is_bad = os.environ["RANK"] == "1" and trainer.run.update == update
        return do_update(trainer, batch.map(lambda images: images * math.nan) if is_bad else batch)

    Trainer.do_update = poisoned


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path):
    """With accumulation; what one of them sees, both leave out."""
    more = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    before = functools.partial(poison_one_process, 7)
    skips = command(tmp_path / "skips", **more, skip_bad_updates=1)
    runs.run(*skips, processes=2, before=before)
    record = runs.read_record(tmp_path / "skips")
    assert record["train"]["skipped_updates"] == 1
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None
    end = tmp_path / "skips/checkpoint-12"
    whole = runs.read_weights(end / "denoiser")
    for gone in (end, tmp_path / "skips/checkpoint-9"):
        shutil.rmtree(gone)
    runs.run(*skips, "--resume_from_checkpoint=latest", processes=2, before=before)
    assert all(torch.equal(value, runs.read_weights(end / "denoiser")[key]) for key, value in whole.items())
