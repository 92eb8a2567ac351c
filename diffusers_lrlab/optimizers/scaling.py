"""Rules that scale a learning rate to another batch size."""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..core.errors import LabError, did_you_mean
from ..core.ranges import POSITIVE
from .entries import OPTIMIZERS

BASE_BATCH = 64  # images of an update that --learning_rate is meant for, with --scale_lr
LINEAR_UP_TO = 512  # images, of the rule "guide"


class Rule(NamedTuple):
    """A rule in words, and its factor on the learning rate for a global batch and a base batch."""

    description: str
    factor: Callable[[float, float], float]


def _guide(batch: float, base: float) -> float:
    def from_one(images: float) -> float:
        return min(images, LINEAR_UP_TO) * math.sqrt(max(images, LINEAR_UP_TO) / LINEAR_UP_TO)

    return from_one(batch) / from_one(base)


SCALING_RULES = {
    "none": Rule("unchanged", lambda batch, base: 1.0),
    "linear": Rule("times the ratio of the batches; for SGD (arXiv 1706.02677)", lambda batch, base: batch / base),
    "sqrt": Rule(
        "times the square root of that ratio; derived for Adam and RMSProp (arXiv 2205.10287)",
        lambda batch, base: math.sqrt(batch / base),
    ),
    "guide": Rule(f"linear up to {LINEAR_UP_TO} images, square root beyond; a rule of thumb", _guide),
}


def scaled_learning_rate(learning_rate: float, rule: str, batch: int, base_batch: int = BASE_BATCH) -> float:
    """The learning rate for a global batch (all micro-batches and processes), given that for the base batch."""
    if rule not in SCALING_RULES:
        raise LabError(f"Unknown rule {rule!r}.{did_you_mean(rule, SCALING_RULES)} Known: {', '.join(SCALING_RULES)}.")
    for name, value in (("learning_rate", learning_rate), ("batch", batch), ("base_batch", base_batch)):
        POSITIVE.check(name, value, "the rules scale by ratios of it")
    return learning_rate * SCALING_RULES[rule].factor(batch, base_batch)


def scaling_warning(rule: str, optimizer: str) -> str | None:
    """A warning if a rule was derived for another type of optimizer, else `None`."""
    if rule not in ("linear", "guide") or "sgd" in OPTIMIZERS[optimizer].traits:
        return None
    return (
        f"--scale_lr {rule} is linear, a rule for SGD. For {optimizer}, which normalises gradients, the derived rule is "
        "sqrt (arXiv 2205.10287)."
    )
