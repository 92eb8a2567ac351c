"""What was chosen by name (optimizer, schedules), from what a user writes to names with all their parameters."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..core.errors import LabError
from ..core.progress import resolve_warmup_updates
from ..core.spec import parse_json_kwargs
from ..optimizers.entries import OPTIMIZERS, check_installed
from ..optimizers.scaling import scaled_learning_rate
from ..schedules.published import PREFIX as HUB_PREFIX
from ..schedules.published import hub_schedule
from ..schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from ..schedules.resolve import merge_spec, published_momentum, resolve_kwargs
from ..schedules.schedule import Schedule
from .config import TrainingConfig


def given_kwargs(kwargs: dict[str, Any] | str | None, flag: str) -> dict[str, Any]:
    """Parameters from a dictionary, or from JSON that `flag` was given."""
    return parse_json_kwargs(kwargs, flag) if isinstance(kwargs, str) else kwargs or {}


# The options of diffusers' script, and the parameters that they are of the optimizers that take them.
_ADAM_OPTIONS = {
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_weight_decay": "weight_decay",
    "adam_epsilon": "eps",
}


def resolve_optimizer(config: TrainingConfig) -> None:
    """Splits name and parameters, and gives Adam's kin the options that diffusers' script has for them."""
    name, kwargs = merge_spec(config.optimizer, given_kwargs(config.optimizer_kwargs, "--optimizer_kwargs"), OPTIMIZERS)
    takes = "adam" in OPTIMIZERS[name].traits
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for option, key in _ADAM_OPTIONS.items():
        value = getattr(config, option)
        asked = value != defaults[option]
        if asked and not takes:
            raise LabError(
                f"--{option} {value} has no effect on {name!r}. Use --optimizer_kwargs; see `lrlab list optimizers`."
            )
        if asked and kwargs.get(key, value) != value:
            raise LabError(f"{key!r} of {name!r} is given twice: --{option} {value} and {key}={kwargs[key]!r}. Drop one.")
        if takes:
            kwargs.setdefault(key, value)
            setattr(config, option, float(kwargs[key]))
    check_installed(name)
    config.optimizer, config.optimizer_kwargs = name, OPTIMIZERS[name].resolve(kwargs)


def resolve_momentum(config: TrainingConfig) -> None:
    """Splits name and parameters of the momentum schedule, and checks what goes with what."""
    given = given_kwargs(config.momentum_scheduler_kwargs, "--momentum_scheduler_kwargs")
    if config.momentum_scheduler is None:
        if given:
            raise LabError(f"--momentum_scheduler_kwargs {given} without --momentum_scheduler. Give its name too.")
        config.momentum_scheduler_kwargs = {}
    else:
        name, given = merge_spec(config.momentum_scheduler, given, MOMENTUM_SCHEDULERS)
        config.momentum_scheduler, config.momentum_scheduler_kwargs = name, MOMENTUM_SCHEDULERS[name].resolve(given)
    schedule = config.schedule  # two schedules of one number are an error here
    if schedule.compensates and "feedback" in SCHEDULERS[config.lr_scheduler].traits:
        raise LabError(
            f"{config.momentum_scheduler!r} sets the learning rate, and so does {config.lr_scheduler!r}, which follows the "
            "validation loss. Use --momentum_scheduler demon beside it."
        )
    if "averages" not in OPTIMIZERS[config.optimizer].traits:
        return
    wrong = []
    if config.lr_scheduler not in ("constant", "constant_with_warmup") or config.momentum_scheduler is not None:
        wrong.append("--lr_scheduler constant_with_warmup and no --momentum_scheduler")
    if config.use_ema:
        wrong.append("--no_use_ema")
    if wrong:
        raise LabError(
            f"{config.optimizer!r} averages the weights in place of a schedule and of an EMA: it goes with "
            f"{', and with '.join(wrong)}."
        )


def resolve_lr_schedule(config: TrainingConfig) -> None:
    """Splits name and parameters, fills in defaults, and settles warm-up as far as the length of the run is known."""
    is_published = config.lr_scheduler.startswith(HUB_PREFIX)
    if is_published:
        config.lr_scheduler_source = hub_schedule(config.lr_scheduler).pin
        config.momentum_scheduler, config.momentum_scheduler_kwargs = published_momentum(
            config.lr_scheduler,
            config.momentum_scheduler,
            given_kwargs(config.momentum_scheduler_kwargs, "--momentum_scheduler_kwargs"),
        )
    name, kwargs = merge_spec(config.lr_scheduler, given_kwargs(config.lr_scheduler_kwargs, "--lr_scheduler_kwargs"))
    flags = {"num_cycles": config.lr_num_cycles, "power": config.lr_power}
    if any(value is not None for value in flags.values()) and is_published:
        raise LabError("--lr_num_cycles and --lr_power would make another schedule of a published one. Leave them out.")
    for key, value in flags.items():
        if value is not None and key in kwargs:
            raise LabError(f"{key!r} is given twice: as --lr_{key} and as {key}={kwargs[key]!r} of {name!r}. Drop one.")
        if value is not None:
            kwargs[key] = value
    entry = SCHEDULERS[name]
    config.lr_scheduler, config.lr_scheduler_kwargs = name, resolve_kwargs(entry, kwargs)
    if config.scale_lr == "none" and not config.auto_learning_rate:  # else the peak is known later
        check_floor(config, config.learning_rate)
    config.lr_num_cycles = config.lr_power = None

    if "no_warmup" in entry.traits:
        if config.lr_warmup_steps:
            raise LabError(
                f"--lr_warmup_steps {config.lr_warmup_steps:g} has no effect on {name!r}, which has no warm-up"
                + ("; use --lr_scheduler constant_with_warmup." if name == "constant" else ". Leave it out.")
            )
        config.lr_warmup_steps = 0
    elif config.lr_warmup_steps is None:
        config.lr_warmup_steps = 0 if "rises" in entry.traits else 0.05
    shape = {key: kwargs[key] for key in ("warmup_type", "warmup_start_ratio", "warmup_lr_rate") if key in kwargs}
    changed = {key: value for key, value in shape.items() if value not in (None, "linear")}
    if changed and config.lr_warmup_steps == 0:
        raise LabError(f"{changed} of {name!r} has no effect without warm-up. Give --lr_warmup_steps, or leave it out.")
    resolve_warmup_updates(config.lr_warmup_steps, config.max_train_steps or 10**12)
    if "feedback" in entry.traits and config.num_validation_images == 0:
        raise LabError(f"{name!r} follows the validation loss; it cannot run with --num_validation_images 0.")


def check_floor(config: TrainingConfig, peak: float) -> None:
    """Raises a `LabError` for a schedule whose floor is above its peak."""
    assert isinstance(config.lr_scheduler_kwargs, dict)  # it is resolved
    if (floor := config.lr_scheduler_kwargs.get("min_lr") or 0.0) > peak:
        rate = "--learning_rate" if config.scale_lr == "none" else "the scaled learning rate"
        raise LabError(f"min_lr={floor:g} of {config.lr_scheduler!r} is above {rate} {peak:g}. Lower it.")


def check_schedule(config: TrainingConfig) -> None:
    """Builds optimizer and schedules once, for what only their own code can refuse; the real length may be unknown yet."""
    import torch

    from ..optimizers.entries import get_optimizer
    from ..schedules.scheduler import build_all

    weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]
    # A launcher has told by now how many processes there are.
    batch = config.train_batch_size * config.gradient_accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    peak = scaled_learning_rate(config.learning_rate, config.scale_lr, batch, config.base_batch_size)
    optimizer = get_optimizer(config.optimizer, weights, peak, **config.optimizer_arguments)
    length = config.max_train_steps or max(1000, 2 * int(config.lr_warmup_steps) + 2)
    schedule = with_batch(config.schedule, batch)
    build_all(schedule, optimizer, config.lr_warmup_steps, length)


def with_batch(schedule: Schedule, images_per_update: int) -> Schedule:
    """The schedule, told the effective batch if it counts images and was not told."""
    if "images_per_update" not in schedule.kwargs or schedule.kwargs["images_per_update"] is not None:
        return schedule
    return dataclasses.replace(schedule, kwargs={**schedule.kwargs, "images_per_update": images_per_update})
