"""Runs that diverge: nothing that is not finite is saved, they stop or go back, and both resume to the bit."""

import functools
import json
import math
import shutil

import pytest
import runs
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import load_data_once
from safetensors.torch import load_file
from trainer_states import assert_same, state_of

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import Diverged, LabError
from diffusers_lrlab.study.spec.parts import read_fields
from diffusers_lrlab.training.checkpoint_writer import kept_checkpoints
from diffusers_lrlab.training.divergence import find_nonfinite
from diffusers_lrlab.training.model import given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.prepare import check_precision
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.resume import resumed_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
LATEST = "--resume_from_checkpoint=latest"
NEVER = 10**6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def options(folder, model, **more):
    small = {"dataset_name": "moons", "max_train_steps": 12, "train_batch_size": 32, "num_validation_images": 16}
    small |= {"logging_steps": 5, "checkpointing_steps": 3, "validation_steps": 6, "log_timestep_bins": 2}
    small |= {"ddpm_num_steps": 4, "num_inference_steps": 2, "save_images_epochs": NEVER}
    return {**small, "model_config_name_or_path": str(model), "output_dir": str(folder), **more}


def make_trainer(folder, model, bad=(), above=0.0, **more):
    """A trainer whose data are NaN at the updates `bad`, while the factor on its rate is above a number."""
    config = resolve_config(TrainingConfig(**options(folder, model, **more)))
    data = load_data_once(config)
    plan = make_plan(config, data, given_model_config(config))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config.gradient_accumulation_steps)
    trainer = Trainer(plan, data, accelerator, RunFolder(folder))
    do_update = trainer.do_update

    def poisoned(batch):
        is_bad = trainer.run.update in bad and (trainer.run.lr_factor or 1.0) > above
        return do_update(batch.map(lambda images: images * math.nan) if is_bad else batch)

    trainer.do_update = poisoned
    return trainer


def checkpoints(folder):
    return [path.name for path in RunFolder(folder).checkpoints()]


def weights_of(checkpoint):
    (file,) = (checkpoint / "denoiser").glob("*.safetensors")
    return load_file(file)


# --- nothing that is not finite is saved ------------------------------------------------------------------------------


def command(folder, model, **more):
    more = {"eval_batch_size": 4, "distance_samples": 0, "cpu_threads": 1, **more}
    return [*(f"--{name}={value}" for name, value in options(folder, model, **more).items()), "--no_preflight"]


# Far above what plain gradient descent bears on this loss.
HOT = {"optimizer": "sgd", "learning_rate": 8, "max_grad_norm": 0, "max_train_steps": 100}
HOT |= {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 60}  # so that it learns something before
HOT |= {"logging_steps": 50, "checkpointing_steps": 5, "validation_steps": 100}


def test_finite_checkpoints_are_not_displaced(tmp_path, model):
    """The log is read every 50 updates; three checkpoints that were not finite stood where finite ones had been."""
    error = runs.run(*command(tmp_path / "run", model, **HOT), expect=2)
    left = [tmp_path / "run" / name for name in checkpoints(tmp_path / "run")]
    assert left
    for checkpoint in left:
        assert all(value.isfinite().all() for value in weights_of(checkpoint).values()), checkpoint
    assert "is not finite around update" in error
    assert f"or continue from {left[-1]} with --resume_from_checkpoint latest --on_divergence rollback" in error
    record = runs.read_record(tmp_path / "run")
    assert record["run"]["status"] == "failed"
    assert "training has diverged" in record["run"]["error"]


def test_what_is_not_finite_is_named(tmp_path, model):
    """In weights, moving average and state of the optimizer; numbers that a 2-norm cannot hold are finite."""
    trainer = make_trainer(tmp_path, model)
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


@pytest.mark.parametrize(
    ("rule", "limit", "expected"),
    [
        ("stop", 2, [9, 11]),
        ("stop", 0, [0, 3, 6, 7, 9, 11]),
        ("rollback", 2, [6, 9, 11]),  # 7 and 11 are of signals: without them it would have been 6 and 9
        ("rollback", 1, [9, 11]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, model, rule, limit, expected):
    for update in (0, 3, 6, 7, 9, 11):
        (tmp_path / f"checkpoint-{update}").mkdir()
        (tmp_path / f"checkpoint-{update}" / "trainer.json").write_text("{}")
    config = TrainingConfig(**options(tmp_path, model, on_divergence=rule, checkpoints_total_limit=limit))
    kept = kept_checkpoints(RunFolder(tmp_path), resolve_config(config))
    assert sorted({path.name for path in kept}) == sorted(f"checkpoint-{update}" for update in expected)


@pytest.mark.slow
def test_a_run_that_must_diverge_trains_to_its_end(tmp_path, model):
    """And to a good one: what it goes back to is not only finite, but from before the loss exploded."""
    folder = tmp_path / "run"
    rule = "rollback:factor=0.1,max_rollbacks=5"
    error = runs.run(*command(folder, model, **HOT, on_divergence=rule), pictures=True)
    record = runs.read_record(folder)
    (rollback,) = record["train"]["rollbacks"]
    assert rollback["diverged_at"] == rollback["back_to"] + 5 > 5
    assert rollback["lr_factor"] == 0.1
    assert f"Back to update {rollback['back_to']}, continuing from there at 0.1 of the scheduled learning rate" in error
    assert record["run"]["status"] == "finished"
    assert record["train"]["results"]["validation_loss"] < 10
    assert record["train"]["schedule_audit"] == {**record["train"]["schedule_audit"], "num_updates": 100}
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None
    rows, _ = runs.read_metrics(folder)
    assert [(row["update"], row["lr"], row["rollbacks"]) for row in rows] == [(49, 8 * (49 / 60) * 0.1, 1), (99, 0.8, 1)]
    card = (folder / "README.md").read_text()
    assert f"went back to update {rollback['back_to']}, and continued at 0.1 of this curve" in card
    runs.run(*command(folder, model, **HOT, on_divergence=rule), LATEST)


# --- rollback ---------------------------------------------------------------------------------------------------------

# At update 7 the data are NaN, until the rate is a quarter. It is noticed before update 9 would be saved: back to update 6,
# to 3 since that did not help, and then to the end.
TWICE = {"bad": (7,), "above": 0.3, "on_divergence": "rollback", "checkpoints_total_limit": 2}
TWICE_DONE = [(9, 6, 0.5), (9, 3, 0.25)]
YIELDS = [*range(1, 9), 7, 8, *range(4, 13)]


def skipped(trainer):
    return trainer.divergence.state_dict()["skipped_updates"]


def end_of(trainer):
    trainer.run.training_seconds = 0.0
    folder = trainer.folder
    state = {**state_of(trainer), "rollbacks": trainer.divergence.rollbacks, "skipped updates": skipped(trainer)}
    return {
        **state,
        "audit": trainer.run.audit.state_dict(),
        "log": folder.metrics_file.read_text(),
        "left": checkpoints(folder.path),
    }


def stopped_and_resumed(folder, model, after, how, **more):
    """The end of a run that is stopped after so many steps of its loop, by a signal or a kill, and goes on."""
    trainer = make_trainer(folder, model, **more)
    updates = trainer.updates(show_progress=False)
    for _ in range(after):
        next(updates)
    if how == "signal":
        trainer._save_or_last()
    updates.close()
    trainer = make_trainer(folder, model, **more)
    if newest := trainer.folder.newest_checkpoint():
        trainer.resume(newest)
    list(trainer.updates(show_progress=False))
    return end_of(trainer)


PLATEAU = "reduce_lr_on_plateau:patience=0,factor=0.7,threshold=0.3"
RESUMED = [(PLATEAU, (5, 10, 14)), ("cosine", range(1, len(YIELDS)))]


@pytest.mark.parametrize("how", ["signal", pytest.param("kill", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("schedule", "stops"),
    [(PLATEAU, (8,)), *(pytest.param(*case, marks=pytest.mark.slow) for case in RESUMED)],
)
def test_a_rollback_is_resumed_to_the_bit(tmp_path, model, schedule, stops, how):
    """Stopped before it diverged, when that was not known yet, in between, and after it went back."""
    more = {**TWICE, "lr_scheduler": schedule}
    whole = make_trainer(tmp_path / "whole", model, **more)
    assert list(whole.updates(show_progress=False)) == YIELDS
    expected = end_of(whole)
    assert [(each["diverged_at"], each["back_to"], each["lr_factor"]) for each in expected["rollbacks"]] == TWICE_DONE
    for after in stops:
        found = stopped_and_resumed(tmp_path / str(after), model, after, how, **more)
        # The checkpoint of a signal stays until the next one.
        found["left"] = [name for name in found["left"] if how == "kill" or name in expected["left"]]
        assert_same(found, expected)


def test_the_audit_knows_the_changed_curve(tmp_path, model):
    trainer = make_trainer(tmp_path, model, **TWICE, lr_scheduler="cosine", strict_lr_audit=True, logging_steps=1)
    list(trainer.updates(show_progress=False))
    assert trainer.run.audit.num_updates == 12
    assert trainer.run.audit.largest_lr_deviation == 0
    rows = [row for row in trainer.folder.read_metrics() if "loss" in row]
    assert [row["update"] for row in rows] == list(range(12))
    expected = [lr * (1 if update < 3 else 0.25) for update, lr in enumerate(trainer.run.plan.lrs)]
    assert [row["lr"] for row in rows] == expected
    assert [row.get("rollbacks") for row in rows] == [None] * 3 + [2] * 9


def test_a_rate_that_is_not_the_changed_one_is_noticed(tmp_path, model):
    trainer = make_trainer(tmp_path, model, **TWICE, lr_scheduler="cosine")
    for update in trainer.updates(show_progress=False):
        if update == 4 and trainer.divergence.rollbacks:
            for group in trainer.run.optimizer.param_groups:
                group["lr"] *= 2
    assert trainer.run.audit.first_deviating_update == 4


def test_after_so_many_rollbacks_it_stops(tmp_path, model):
    trainer = make_trainer(tmp_path, model, bad=(7,), on_divergence="rollback:factor=0.1,max_rollbacks=3")
    with pytest.raises(Diverged, match=r"The run has already gone back to update 6, 3, 6, as often as max_rollbacks"):
        list(trainer.updates(show_progress=False))
    assert checkpoints(tmp_path) == ["checkpoint-0", "checkpoint-3", "checkpoint-6"]
    assert [each["lr_factor"] for each in trainer.divergence.rollbacks] == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.slow
def test_a_run_that_stopped_may_go_back_more_often(tmp_path, model):
    """It ends as one that was allowed to from the beginning."""
    rare, often = ({"bad": (7,), "above": 0.2, "on_divergence": f"rollback:max_rollbacks={most}"} for most in (2, 3))
    whole = make_trainer(tmp_path / "whole", model, **often)
    list(whole.updates(show_progress=False))
    trainer = make_trainer(tmp_path / "run", model, **rare)
    with pytest.raises(
        Diverged, match=r"max_rollbacks of --on_divergence allows. To allow more, raise max_rollbacks and add --resume"
    ):
        list(trainer.updates(show_progress=False))
    trainer = make_trainer(tmp_path / "run", model, **often)
    newest = trainer.folder.newest_checkpoint()
    resumed_config(trainer.run.config, newest)
    trainer.resume(newest)
    list(trainer.updates(show_progress=False))
    assert len(trainer.divergence.rollbacks) == 3
    assert_same(end_of(trainer), end_of(whole))


def test_a_run_that_stopped_goes_on_by_rollback(tmp_path, model):
    """It ends as one that was to roll back from the beginning."""
    whole = make_trainer(tmp_path / "whole", model, **TWICE)
    list(whole.updates(show_progress=False))
    stops = {**TWICE, "on_divergence": "stop"}
    with pytest.raises(Diverged, match="The loss of the run is not finite around update 9 .* continue from .*checkpoint-6"):
        list(make_trainer(tmp_path / "run", model, **stops).updates(show_progress=False))
    trainer = make_trainer(tmp_path / "run", model, **TWICE)
    trainer.resume(trainer.folder.newest_checkpoint())
    list(trainer.updates(show_progress=False))
    assert_same(end_of(trainer), end_of(whole))


def test_a_run_does_not_go_on_from_ruins(tmp_path, model):
    """The checkpoints of a run that was to stop may be finite and from after the loss exploded."""
    hot = {**HOT, "logging_steps": 5}
    with pytest.raises(Diverged, match="not finite"):
        list(make_trainer(tmp_path, model, **hot).updates(show_progress=False))
    trainer = make_trainer(tmp_path, model, **hot, on_divergence="rollback")
    trainer.resume(trainer.folder.newest_checkpoint())
    with pytest.raises(
        Diverged, match="The loss grew to .* times its first value .* The run has already gone back to update"
    ):
        list(trainer.updates(show_progress=False))


def test_what_decides_where_a_run_goes_back_to_may_not_change(tmp_path, model):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()

    def check(saved, rollbacks=(), **now):
        config = resolve_config(TrainingConfig(**options(tmp_path, model, **saved))).to_dict()
        (checkpoint / "trainer.json").write_text(json.dumps({"config": config, "rollbacks": rollbacks}))
        resumed_config(resolve_config(TrainingConfig(**options(tmp_path, model, **now))), checkpoint)

    rolls_back, went_back = {"on_divergence": "rollback"}, [{"diverged_at": 9, "back_to": 6, "lr_factor": 0.5}]
    check({}, on_divergence="rollback", checkpointing_steps=4)
    check(rolls_back, went_back, on_divergence="rollback:max_rollbacks=5")
    with pytest.raises(LabError, match="--checkpointing_steps: 3 then, 4 now"):
        check(rolls_back, **rolls_back, checkpointing_steps=4)
    with pytest.raises(
        LabError, match="--on_divergence: 'rollback:factor=0.5,max_rollbacks=3,explosion=100.0' then, 'stop' now"
    ):
        check(rolls_back, went_back)


# --- skipped updates ---------------------------------------------------------------------------------------------------


def test_a_bad_update_leaves_everything_but_the_clock(tmp_path, model):
    trainer = make_trainer(tmp_path, model, bad=(4,), skip_bad_updates=1, timestep_sampler="loss_second_moment")
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


@pytest.mark.parametrize(
    ("how", "accumulation"),
    [("kill", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("kill", 1), ("signal", 1), ("signal", 2)))],
)
def test_skipped_updates_are_resumed_to_the_bit(tmp_path, model, how, accumulation):
    more = {"bad": (4, 5, 9), "skip_bad_updates": 2, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    whole = make_trainer(tmp_path / "whole", model, **more)
    list(whole.updates(show_progress=False))
    for after in (5, 6, 10):
        found = stopped_and_resumed(tmp_path / str(after), model, after, how, **more)
        found["left"] = checkpoints(tmp_path / "whole")
        assert_same(found, end_of(whole))
    rows = whole.folder.read_metrics()
    assert [row["update"] for row in rows if "lr" in row and "loss" not in row] == [4, 5, 9]
    assert rows[-2]["skipped_updates"] == 3


def test_too_many_in_a_row(tmp_path, model):
    trainer = make_trainer(tmp_path, model, bad=(4, 5, 6), skip_bad_updates=2)
    with pytest.raises(Diverged, match="The gradients of 3 updates in a row are not finite around update 6"):
        list(trainer.updates(show_progress=False))
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]


def test_both_together(tmp_path, model):
    """What is counted goes back with the checkpoint."""
    more = {**TWICE, "bad": (2, 7, 8), "above": 0.3, "skip_bad_updates": 1}
    trainer = make_trainer(tmp_path, model, **more)
    list(trainer.updates(show_progress=False))
    assert [(each["diverged_at"], each["back_to"]) for each in trainer.divergence.rollbacks] == [(8, 6), (8, 3)]
    assert skipped(trainer) == {"total": 1, "in_a_row": 0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"on_divergence": "rolback"}, "Unknown rule for a run that diverges 'rolback'. Did you mean 'rollback'"),
        ({"on_divergence": "rollback:factor=1"}, r"factor=1 of 'rollback': must be a number in \(0, 1\)"),
        ({"on_divergence": "stop:factor=0.5"}, "'stop' does not take 'factor'"),
        ({"skip_bad_updates": 0}, "--skip_bad_updates 0: must be a whole number in \\[1, 1e9\\]"),
    ],
)
def test_what_is_refused(given, expected):
    with pytest.raises(LabError, match=expected):
        resolve_config(TrainingConfig(dataset_name="moons", **given))


def test_where_they_have_no_place():
    config = resolve_config(TrainingConfig(dataset_name="moons", skip_bad_updates=3, mixed_precision="fp16"))
    with pytest.raises(LabError, match="--skip_bad_updates 3 has no effect with fp16, whose loss scaling repeats"):
        check_precision(config)
    for name, value in (("on_divergence", "rollback"), ("skip_bad_updates", 3)):
        with pytest.raises(LabError, match=f"{name}, which a study sets itself"):
            read_fields({name: value}, "base")


# --- two processes -----------------------------------------------------------------------------------------------------


def poison_one_process(update, above):
    """Called in each process, first: one of two sees data that are NaN, as long as the factor on its rate is above this."""
    import os

    from diffusers_lrlab.training.trainer import Trainer

    do_update = Trainer.do_update

    def poisoned(trainer, batch):
        is_bad = os.environ["RANK"] == "1" and trainer.run.update == update and (trainer.run.lr_factor or 1.0) > above
        return do_update(trainer, batch.map(lambda images: images * math.nan) if is_bad else batch)

    Trainer.do_update = poisoned


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path, model):
    """With accumulation; what one of them sees, both go back for or leave out."""
    more = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    before = functools.partial(poison_one_process, 7, 0.3)
    goes_back = command(tmp_path / "back", model, **more, on_divergence="rollback")
    runs.run(*goes_back, processes=2, before=before)
    record = runs.read_record(tmp_path / "back")
    assert [(each["diverged_at"], each["back_to"]) for each in record["train"]["rollbacks"]] == [(9, 6), (9, 3)]
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None
    skips = command(tmp_path / "skips", model, **more, skip_bad_updates=1)
    runs.run(*skips, processes=2, before=before)
    assert runs.read_record(tmp_path / "skips")["train"]["skipped_updates"] == 1
    for name, arguments in (("back", goes_back), ("skips", skips)):
        end, whole = tmp_path / name / "checkpoint-12", weights_of(tmp_path / name / "checkpoint-12")
        for gone in (end, tmp_path / name / "checkpoint-9"):
            shutil.rmtree(gone)
        runs.run(*arguments, LATEST, processes=2, before=before)
        assert all(torch.equal(value, weights_of(end)[key]) for key, value in whole.items())
