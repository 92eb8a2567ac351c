"""The registries of schedules. Importing the package (`schedules/__init__.py`) fills them."""

import math
from typing import Any

import numpy as np

from ..core.plugins import real_values, unusable
from ..core.progress import Progress
from ..core.registry import Parameter, Registry

_HINT = ". The update may be an array: use numpy instead of `if` or `math`."


def half_cosine(fraction: Any) -> Any:
    """1 at 0, 0 at 1."""
    cos = math.cos if isinstance(fraction, float) else np.cos  # `math` is faster for a single number
    return 0.5 * (1 + cos(math.pi * fraction))


# The warm-ups of transformers' warmup_stable_decay, by their names there.
RAMPS = {"linear": lambda x: x, "cosine": lambda x: 0.5 * (1 - np.cos(math.pi * x)), "1-sqrt": lambda x: 1 - np.sqrt(1 - x)}
# Its cool-downs, from 1 to 0 for q from 0 to 1. The exponential one falls to 1 % and is rescaled to reach 0.
COOLDOWNS = {
    "linear": lambda q: 1 - q,
    "cosine": half_cosine,
    "exponential": lambda q: (0.01**q - 0.01) / 0.99,
    "1-sqrt": lambda q: 1 - np.sqrt(q),
    "square": lambda q: 1 - q**2,
    "mirror_cosine": lambda q: 2 * (1 - q) - half_cosine(q),
}


def _check_factor(value: Any, progress: Progress, *_: Any) -> Any:
    """The value of a schedule of the clock. Entries that follow a metric return one of torch's schedulers."""
    if type(value) in (float, np.float64) or not isinstance(progress, Progress):
        return value
    return real_values(value, _wanted(progress), (), np.shape(progress.update))


def _check_momentum(value: Any, progress: Progress, *_: Any) -> tuple[Any, Any]:
    """The two values of a momentum schedule."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise unusable("two values, the momentum and a factor on the learning rate", value)
    shape, wanted = np.shape(progress.update), f"for the momentum and the factor {_wanted(progress)} each"
    momentum, factor = (real_values(each, wanted, (), shape) for each in value)
    return momentum, factor


def _wanted(progress: Progress) -> str:
    shape = np.shape(progress.update)
    return f"a real number, or an array of shape {shape} like the clock's" if shape else "a real number"


SCHEDULERS = Registry(
    "learning-rate schedule",
    returns=_check_factor,
    hint=_HINT,
    common=(
        Parameter("min_lr", float, None, "floor of the learning rate; 0 if not given", "[0, inf)"),
        Parameter("min_lr_ratio", float, None, "the floor, relative to the optimizer's learning rate", "[0, 1]"),
        Parameter("warmup_type", str, "linear", "shape of the warm-up", choices=tuple(RAMPS)),
        Parameter("warmup_start_ratio", float, None, "where warm-up starts, relative to its end; 0 if not given", "[0, 1]"),
    ),
    traits={
        "host": "one of diffusers' own names",
        "no_warmup": "takes no warm-up",
        "rises": "rises by its own shape over the updates of warm-up",
        "feedback": "also follows a metric; registered as `module:Class`",
        "momentum": "also sets the momentum, by the momentum schedule of the same name",
        "endless": "does not need the length of the run",
        "floor_of_all": "`min_lr` is the floor of every parameter group, whatever its learning rate, as in torch",
        "warmup_from_floor": "warm-up starts at the floor, as in transformers' `warmup_stable_decay`",
        "early_peak": "counts from 1, as in transformers' `cosine_warmup_with_min_lr`",
    },
)

# Of schedules that follow a metric; their classes are in modules that need torch.
NO_SHAPE = ("min_lr", "min_lr_ratio", "warmup_type", "warmup_start_ratio")  # common parameters that they do not take
METRIC_MODE = Parameter("mode", str, "min", "whether the metric should fall or rise", choices=("min", "max"))
THRESHOLD_MODES = ("rel", "abs")

register_schedule = SCHEDULERS.register
"""Registers a learning-rate schedule, `f(progress, **parameters) -> factor`, with the arguments of [`Registry.register`]."""

MOMENTUM_SCHEDULERS = Registry(
    "momentum schedule", returns=_check_momentum, hint=_HINT, traits={"compensates": "its factor is not 1"}
)
"""Entries are functions `f(progress, momentum, **parameters) -> (momentum, factor on the learning rate)`."""

register_momentum_schedule = MOMENTUM_SCHEDULERS.register
"""Registers a momentum schedule, likewise."""
