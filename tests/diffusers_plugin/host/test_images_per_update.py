"""The images of an update of a third-party script: known if its loader and its arguments say the same; its updates."""

from types import SimpleNamespace

import pytest
from tables import cases

from diffusers_lrlab import LabError
from diffusers_lrlab.diffusers_plugin.host.run import HostRun


def run_of(size, processes=1, accumulation=1, **arguments):
    run = HostRun()
    run.arguments = arguments
    run.accelerator = SimpleNamespace(num_processes=processes, gradient_accumulation_steps=accumulation)
    run.training_loader = SimpleNamespace(total_batch_size=size)
    return run


@cases(
    ("run", "images"),
    [
        (run_of(16, train_batch_size=16), 16),
        (run_of(32, 2, train_batch_size=16), 32),
        (run_of(32, 2, 4, train_batch_size=16), 128),
        (run_of(16, 2, train_batch_size=16), 16),  # split_batches
        (run_of(8, train_batch_size=8, gradient_accumulation_steps=4), 32),  # a script that accumulates by itself
        (run_of(1, accumulation=4, train_batch_size=1), 4),
        (run_of(12), 12),  # a script without such an argument
    ],
)
def test_known(run, images):
    assert run.images_per_update("--ema half_life") == images == run.must_know_images("--ema half_life")


@cases(
    "run",
    [
        run_of(1, train_batch_size=4),  # sd-scripts: its dataset yields batches
        run_of(2, 2),
        run_of(None, train_batch_size=4),  # a batch sampler of its own
    ],
)
def test_not_known(run):
    with pytest.raises(LabError, match=r"--optimizer adamw counts images, and .* Add images_per_update=N to it"):
        run.images_per_update("--optimizer adamw")


def test_not_yet_known():
    run = run_of(4)
    run.training_loader, run.accelerator.gradient_state = None, SimpleNamespace(active_dataloader=None)
    assert run.images_per_update("--ema half_life") is None
    with pytest.raises(LabError, match="prepares its data without accelerate. Add images_per_update=N"):
        run.must_know_images("--ema half_life")


def test_epochs_of_sd_scripts_come_before_its_steps():
    run = HostRun()
    run.arguments, run.training_loader = {"max_train_steps": 1600, "max_train_epochs": None}, [None] * 9
    run.accelerator = SimpleNamespace(gradient_accumulation_steps=4)
    assert run.count_updates() == 1600
    run.arguments["max_train_epochs"] = 2
    assert run.count_updates() == 6
