"""All checks before training, in the order of their warnings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import LabError
from . import data_checks, setting_checks
from .subject import Subject

if TYPE_CHECKING:
    from ..training.trainer import Trainer

CHECKS: dict[str, Callable[[Subject], str | None]] = {
    name: getattr(module, name)
    for module, names in (
        (data_checks, ("value_range", "image_sizes", "sorted_stream", "empty_classes")),
        (setting_checks, ("terminal_snr", "model_and_scheduler", "ema_memory", "warmup_share")),
        (setting_checks, ("learning_rate", "dead_parameters")),
    )
    for name in names
}


def run_checks(trainer: Trainer) -> dict[str, str]:
    """Messages of the checks that found something, by name. Restores the trainer, to the bit."""
    subject, found = Subject(trainer), {}
    for name, check in CHECKS.items():
        try:
            message = check(subject)
        except LabError as error:
            message = f"Not checked: {error}"
        if message is not None:
            found[name] = message
    return found


def check_before_training(trainer: Trainer) -> dict[str, str]:
    """Runs the requested checks, prints and returns their warnings."""
    config, accelerator = trainer.run.config, trainer.accelerator
    found: dict[str, str] = {}
    if config.preflight and accelerator.is_main_process:
        found = run_checks(trainer)
        for name, message in found.items():
            sys.stderr.write(f"warning: {message} [{name}]\n")
    accelerator.wait_for_everyone()
    return found
