"""What is known of a third-party script while it runs: its option for a schedule, its images and its updates."""

from types import SimpleNamespace

import pytest
from tables import cases

from diffusers_lrlab import LabError
from diffusers_lrlab.diffusers_plugin.host.run import HostRun, _widened


def run_of(size, processes=1, accumulation=1, **arguments):
    run = HostRun()
    run.arguments = arguments
    run.accelerator = SimpleNamespace(num_processes=processes, gradient_accumulation_steps=accumulation)
    run.training_loader = SimpleNamespace(total_batch_size=size)
    return run


@cases(
    ("run", "images"),
    [
        (run_of(32, 2, 4, train_batch_size=16), 128),
        (run_of(16, 2, train_batch_size=16), 16),  # split_batches
        (run_of(8, train_batch_size=8, gradient_accumulation_steps=4), 32),  # a script that accumulates by itself
        (run_of(1, accumulation=4, train_batch_size=1), 4),
        (run_of(12), 12),  # a script without such an argument
    ],
)
def test_images_of_an_update(run, images):
    assert run.images_per_update("--ema half_life") == images


@cases(
    "run",
    [
        run_of(1, train_batch_size=4),  # sd-scripts: its dataset yields batches
        run_of(2, 2),
        run_of(None, train_batch_size=4),  # a batch sampler of its own
        HostRun(),  # data that are prepared without accelerate
    ],
)
def test_images_that_are_not_known(run):
    with pytest.raises(LabError, match=r"--optimizer adamw counts images, and .* Add images_per_update=N to it"):
        run.images_per_update("--optimizer adamw")


def test_epochs_of_sd_scripts_come_before_its_steps():
    run = HostRun()
    run.arguments, run.training_loader = {"max_train_steps": 1600, "max_train_epochs": None}, [None] * 9
    run.accelerator = SimpleNamespace(gradient_accumulation_steps=4)
    assert run.count_updates() == 1600
    run.arguments["max_train_epochs"] = 2
    assert run.count_updates() == 6


def test_a_default_that_is_a_list_is_left_alone():
    script = SimpleNamespace(texts=(), has_schedules_of_diffusers=True)
    for options in ({"choices": ["cosine"]}, {}):
        widened = _widened({"nargs": "+", "default": ["cosine"], **options}, script)
        assert widened["default"] == ["cosine"]
        assert widened["type"]("rex:d=0.9") == "rex:d=0.9"
