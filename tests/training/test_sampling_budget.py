"""What is sampled without being asked for takes a small share of a run."""

import dataclasses

import pytest

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.training.kinds import KINDS
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.prepare import prepare

FOLLOWED = {"lr_scheduler": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {}}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Plans of runs on digits with other options."""
    plan, data, _ = prepare(TrainingConfig(output_dir=str(tmp_path_factory.mktemp("run"))))
    return lambda **options: make_plan(dataclasses.replace(plan.config, **options), data, None)


@pytest.mark.parametrize(("updates", "times"), [(2408, 4), (400, 0)])
def test_previews_take_a_twentieth_of_a_run(planned, updates, times):
    """By images: a step of sampling costs 0.4 of the training of an image."""
    plan = planned(max_train_steps=updates)
    assert plan.num_previews == times
    sampled = times * plan.config.eval_batch_size * plan.config.num_inference_steps
    assert 0.4 * sampled <= 0.05 * updates * 64
    assert sum(plan.due(None, update, plan.num_previews) for update in range(1, updates)) == times
    text = f"{times} times during the run, and at the end" if times else "100 steps at the end"
    assert text in describe_plan(plan)


def test_a_short_run_is_measured_by_fewer_samples():
    images, points = KINDS["images"](), KINDS["points"]()
    found = [images.measured_samples(updates * 64, 256, 1541) for updates in (2408, 240, 200)]
    assert found == [1000, 100, 0]
    held_out = ((20_000, 10_000), (5_000, 10_000), (1, 10_000), (10_000, 2_000))
    found = [points.measured_samples(updates * 256, num_held_out, 100_000) for updates, num_held_out in held_out]
    assert found == [10_000, 5_000, 200, 2_000]


def test_a_short_run_is_validated_less_often_unless_that_is_asked_for_or_followed(planned):
    assert [planned(max_train_steps=updates).num_validations for updates in (2408, 300, 1)] == [21, 11, 1]
    asked = planned(max_train_steps=40, validation_steps=3)
    followed = planned(max_train_steps=40, **FOLLOWED)
    assert (asked.validation_updates, asked.num_validations) == (3, 14)
    assert (followed.validation_updates, followed.num_validations) == (2, 20)
