"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import LabError
from .data_checks import constant_images, image_sizes, near_duplicates, value_range
from .model_checks import dead_parameters
from .setting_checks import (
    ema_memory,
    learning_rate,
    model_and_scheduler,
    terminal_snr,
    times_seen,
    timesteps,
    warmup_share,
)
from .subject import Subject

if TYPE_CHECKING:
    from ..training.trainer import Trainer

CHECKS: dict[str, Callable[[Subject], str | None]] = {
    check.__name__: check
    for check in (
        value_range,
        constant_images,
        near_duplicates,
        image_sizes,
        timesteps,
        terminal_snr,
        model_and_scheduler,
        ema_memory,
        warmup_share,
        learning_rate,
        times_seen,
        dead_parameters,
    )
}


def run_checks(trainer: Trainer) -> dict[str, str]:
    """
    What the checks find.

    Args:
        trainer ([`Trainer`]): About to begin; afterwards it is as it was, to the bit.

    Returns:
        `dict`: from names in `CHECKS` to messages, of those that have one.
    """
    subject, found = Subject(trainer), {}
    for name, check in CHECKS.items():
        try:
            message = check(subject)
        except LabError as error:
            message = f"This could not be checked: {error}"
        if message is not None:
            found[name] = message
    return found
