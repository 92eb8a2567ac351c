"""Runs with `--width_base`: rates, log, audit, resume, plan, and what is refused."""

import shutil
from types import SimpleNamespace

import helpers
import pytest
import runs
import torch
from tables import cases
from trainer_states import assert_same

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.finder.find import find_lr_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.study.stacked.stacks import not_stackable
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.plots import plot_lr
from diffusers_lrlab.training.prepare import resolve_and_check
from diffusers_lrlab.training.resolve import resolve_config

POINTS = [
    "--dataset_name=moons", "--denoiser=mlp:hidden_size=32,num_layers=1,embedding_size=8", "--width_base=8",
    "--train_batch_size=32", "--num_validation_images=64", "--max_train_steps=6", "--checkpointing_steps=3",
    "--logging_steps=1", "--learning_rate=1e-2", "--no_evaluation", "--no_preflight",
    "--strict_lr_audit", "--timestep_lr=banded:factors=[1|2]",
]  # fmt: skip


def make_trainer(folder, **options):
    small = {"dataset_name": "moons", "max_train_steps": 6, "train_batch_size": 32, "num_validation_images": 64}
    small |= {"denoiser": "mlp:hidden_size=32,num_layers=1,embedding_size=8", "learning_rate": 1e-2, "evaluation": False}
    return helpers.make_trainer(folder, {**small, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width") / "run"
    shown = runs.run(*POINTS, f"--output_dir={folder}")
    return folder, shown


def test_the_log_has_the_rate_of_each_group(whole):
    folder, _ = whole
    rows, _ = runs.read_metrics(folder)
    assert all(row["lr_hidden"] == pytest.approx(row["lr"] / 4, rel=1e-12) for row in rows)
    assert len({row["lr"] for row in rows}) > 2
    assert (folder / "lrlab" / "lr.png").exists()


def test_the_record_has_the_roles_and_the_audit(whole):
    record = runs.read_record(whole[0])
    assert record["config"]["width_base"] == 8
    width = record["train"]["width"]
    assert (width["width"], width["base"]) == (32, 8)
    assert width["lr_factors"] == {"input": 1.0, "vector": 1.0, "hidden": 0.25, "output": 0.25}
    assert width["roles"]["blocks.0.weight"] == "hidden"
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None


def test_a_resumed_run_ends_with_the_same_bits(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    runs.run(*POINTS, f"--output_dir={tmp_path / 'run'}", "--resume_from_checkpoint=latest")
    assert_same(runs.read_weights(tmp_path / "run/denoiser"), runs.read_weights(folder / "denoiser"))
    assert runs.read_metrics(folder) == runs.read_metrics(tmp_path / "run")


def test_the_audit_sees_each_group(tmp_path):
    trainer = make_trainer(tmp_path, width_base=8, strict_lr_audit=True)
    trainer.run.check_rates()
    trainer.run.optimizer.param_groups[1]["lr"] = 1.0
    with pytest.raises(LabError, match="has a learning rate of 1 where the schedule expects"):
        trainer.run.check_rates()


def states(folder, **options):
    """Weights and rates of a run that starts from the same weights, whatever its options."""
    trainer = make_trainer(folder, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.run.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    for _ in trainer.updates(show_progress=False):
        pass
    return trainer.run.model.state_dict(), trainer.run.optimizer.param_groups


def test_the_base_itself_trains_as_without_muP(tmp_path):
    """To the bit, from the same initial weights."""
    plain, base = (states(tmp_path / str(name), width_base=name) for name in (None, 32))
    assert len(plain[1]) == len(base[1]) == 1
    assert plain[1][0]["lr"] == base[1][0]["lr"]
    assert all(torch.equal(value, base[0][name]) for name, value in plain[0].items())
    wider, _ = states(tmp_path / "8", width_base=8)
    assert not torch.equal(plain[0]["blocks.0.weight"], wider["blocks.0.weight"])


@cases("schedule", ["reduce_lr_on_plateau", "join:schedules=[constant|cosine],boundaries=[0.5]"])
def test_every_group_follows_the_schedule(tmp_path, schedule):
    trainer = make_trainer(tmp_path / schedule.partition(":")[0], width_base=8, lr_scheduler=schedule, strict_lr_audit=True)
    for _ in trainer.updates(show_progress=False):
        lrs = trainer.run.current_lrs
        assert lrs["lr_hidden"] == pytest.approx(lrs["lr"] / 4, rel=1e-9)


def test_the_finder_keeps_the_factors(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, width_base=8)
    seen = []
    step = trainer.run.optimizer.step
    monkeypatch.setattr(
        trainer.run.optimizer, "step", lambda: (seen.append(tuple(trainer.run.current_lrs.values())), step())[1]
    )
    find_lr_of(trainer, FinderConfig(num_updates=10, repeats=1))
    assert len({lr for lr, _ in seen}) > 5
    assert all(hidden == lr / 4 for lr, hidden in seen)


@pytest.mark.pictures
def test_the_plan_shows_the_factors(tmp_path):
    plan = make_trainer(tmp_path, width_base=8, adam_weight_decay=0.1).run.plan
    text = describe_plan(plan)
    assert "width  32, of a base of 8 (muP)" in text
    assert "learning rate x 1: input layers and embeddings (input.weight)" in text
    assert "learning rate x 0.25, weight decay x 4: hidden matrices (blocks.*.weight)" in text
    plot_lr([{"update": 0, "lr": 1e-2, "lr_hidden": 2.5e-3}], plan, tmp_path / "lr.png")


def test_a_run_with_groups_is_not_stacked():
    config = resolve_config(TrainingConfig(dataset_name="moons", width_base=8))
    reason = not_stackable(SimpleNamespace(config=config), None)
    assert reason == "stacks have one learning rate per run, and its --width_base gives it several"


@cases(
    ("options", "part"),
    [
        (
            {"optimizer": "sgd"},
            "--optimizer 'sgd': must be adamw, lion or adamw_8bit with --width_base, got 'sgd'. Hint",
        ),
        ({"dataset_name": "digits"}, "--width_base: a UNet2DModel has no rule for its width: a UNet has a width"),
        ({"lr_scheduler": "cosine_annealing:eta_min=1e-5"}, "has one floor for all of them. Hint: give it min_lr=0"),
        (
            {"pretrained_model_name_or_path": "somewhere"},
            "--width_base 8 has no effect with --pretrained_model_name_or_path",
        ),
    ],
)
def test_what_has_no_rule_is_refused_before_data_are_read(options, part):
    with pytest.raises(LabError, match=part):
        resolve_and_check(TrainingConfig(**{"dataset_name": "moons", "width_base": 8, "max_train_steps": 6, **options}))
