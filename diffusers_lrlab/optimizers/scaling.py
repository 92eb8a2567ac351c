"""Rules that scale a learning rate to another batch size, and to another width."""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..core.errors import LabError, did_you_mean
from ..core.ranges import COUNT, POSITIVE
from .entries import OPTIMIZERS

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


def scaled_learning_rate(learning_rate: float, rule: str, batch: int, base_batch: int) -> float:
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


def width_table(learning_rate: float, base: int, width: int | None = None) -> str:
    """A table of the rates and weight decays of muP for widths of half to 16 times the base, with a row for `width`."""
    for name, value in (("width_base", base), ("width", width)):
        COUNT.check(f"--{name}", value, "a width counts the units of a hidden layer")
    widths = {max(1, round(base * 2.0**power)) for power in range(-1, 5)} | ({width} if width else set())
    lines = [f"{'width':>10}{'inputs, biases, norms':>24}{'hidden, output':>16}{'their weight decay':>20}"]
    for each in sorted(widths):
        mark = "  <- this width" if each == width else "  base" if each == base else ""
        lines.append(
            f"{each:>10}{learning_rate:>24.3g}{learning_rate * base / each:>16.3g}{f'x {each / base:.4g}':>20}{mark}"
        )
    return "\n".join([*lines, "", "muP (arXiv 2203.03466), by --width_base; `lrlab plan` names the parameters of a model"])


def scaling_table(learning_rate: float, base_batch: int, batch: int | None = None) -> str:
    """A table of all rules for batches of an eighth to 64 times the base, with a row for `batch`."""
    batches = {max(1, round(base_batch * 2.0**power)) for power in range(-3, 7)} | ({batch} if batch else set())
    names = [name for name in SCALING_RULES if name != "none"]
    lines = [f"{'batch':>10}" + "".join(f"{name:>12}" for name in names)]
    for size in sorted(batches):
        rates = [scaled_learning_rate(learning_rate, name, size, base_batch) for name in names]
        mark = "  <- this batch" if size == batch else "  base" if size == base_batch else ""
        lines.append(f"{size:>10}" + "".join(f"{rate:>12.3g}" for rate in rates) + mark)
    return "\n".join([*lines, "", *(f"{name:>10}  {SCALING_RULES[name].description}" for name in names)])
