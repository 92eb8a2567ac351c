"""Resolves learning-rate schedule, warm-up and momentum to names with all their parameters."""

import os
from typing import Any

from ..core.errors import LabError
from ..core.progress import resolve_warmup_updates
from ..core.spec import merge_spec
from ..optimizers.entries import OPTIMIZERS
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import resolve_kwargs
from ..schedules.schedule import Schedule
from .choices import given_kwargs, resolve_choice
from .config import ResolvedConfig, TrainingConfig


def resolve_lr_schedule(config: TrainingConfig) -> dict[str, Any]:
    """The schedule with all its parameters and its warm-up."""
    name, kwargs = merge_spec(config.lr_scheduler, given_kwargs(config, "lr_scheduler"), SCHEDULERS)
    resolved = resolve_kwargs(SCHEDULERS[name], kwargs)
    if config.scale_lr == "none" and not config.finds_learning_rate:  # else the peak is not known yet
        check_floor(name, resolved, config.learning_rate or 0.0)
    if "feedback" in SCHEDULERS[name].traits and config.num_validation_images == 0:
        raise LabError(f"{name!r} follows the validation loss; it cannot run with --num_validation_images 0.")
    return {
        "lr_scheduler": name,
        "lr_scheduler_kwargs": resolved,
        "lr_warmup_steps": _warmup(config, name, kwargs),
    }


def _warmup(config: TrainingConfig, name: str, kwargs: dict[str, Any]) -> float:
    """Warm-up in updates or as a fraction of the run; 0 for schedules without one or with a rise of their own."""
    traits, warmup = SCHEDULERS[name].traits, config.lr_warmup_steps
    if "no_warmup" in traits:
        if warmup:
            raise LabError(
                f"--lr_warmup_steps {warmup:g} has no effect on {name!r}, which has no warm-up"
                + ("; use --lr_scheduler constant_with_warmup." if name == "constant" else ". Leave it out.")
            )
        warmup = 0
    elif warmup is None:
        warmup = 0 if "rises" in traits else 0.05
    shape = {key: kwargs[key] for key in ("warmup_type", "warmup_start_ratio", "warmup_lr_rate") if key in kwargs}
    changed = {key: value for key, value in shape.items() if value not in (None, "linear")}
    if changed and warmup == 0:
        raise LabError(f"{changed} of {name!r} has no effect without warm-up. Give --lr_warmup_steps, or leave it out.")
    resolve_warmup_updates(warmup, config.max_train_steps or 10**12)
    return warmup


def resolve_momentum(config: TrainingConfig) -> dict[str, Any]:
    """The momentum schedule with all its parameters, checked against schedule, optimizer and EMA."""
    resolved = resolve_choice(config, "momentum_scheduler")
    momentum, kwargs = resolved["momentum_scheduler"], resolved["momentum_scheduler_kwargs"]
    # Raises for two schedules of one number.
    schedule = Schedule(config.lr_scheduler, given_kwargs(config, "lr_scheduler"), momentum, kwargs)
    if schedule.compensates and "feedback" in SCHEDULERS[config.lr_scheduler].traits:
        raise LabError(
            f"{momentum!r} sets the learning rate, and so does {config.lr_scheduler!r}, which follows the validation loss. "
            "Use --momentum_scheduler demon beside it."
        )
    if "averages" in OPTIMIZERS[config.optimizer].traits:
        _check_averaging(config, momentum)
    return resolved


def _check_averaging(config: TrainingConfig, momentum: str | None) -> None:
    """Raises a `LabError` for an EMA or a schedule beside an optimizer that replaces both."""
    wrong = []
    if config.lr_scheduler not in ("constant", "constant_with_warmup") or momentum is not None:
        wrong.append("--lr_scheduler constant_with_warmup and no --momentum_scheduler")
    if config.use_ema:
        wrong.append("--no_use_ema")
    if wrong:
        raise LabError(
            f"{config.optimizer!r} averages the weights in place of a schedule and of an EMA: it goes with "
            f"{', and with '.join(wrong)}."
        )


def check_floor(name: str, kwargs: dict[str, Any], peak: float, scale_lr: str = "none") -> None:
    """Raises a `LabError` for a schedule whose floor is above its peak."""
    if (floor := kwargs.get("min_lr") or 0.0) > peak:
        rate = "--learning_rate" if scale_lr == "none" else "the scaled learning rate"
        raise LabError(f"min_lr={floor:g} of {name!r} is above {rate} {peak:g}. Lower it.")


def check_schedule(config: ResolvedConfig) -> None:
    """Builds optimizer and schedules once, for errors of their own code; the real length may be unknown."""
    from ..optimizers.build import tried_optimizer
    from ..schedules.scheduler import build_all

    # WORLD_SIZE is the number of processes of the launcher.
    batch = config.train_batch_size * config.gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    schedule, peak = config.schedule_for(batch), config.peak_learning_rate(batch)
    optimizer = tried_optimizer(config.optimizer, config.optimizer_kwargs, [(2, 2), (2,)], peak, batch)
    length = config.max_train_steps or max(1000, 2 * int(config.lr_warmup_steps) + 2)
    build_all(schedule, optimizer, config.lr_warmup_steps, length)
