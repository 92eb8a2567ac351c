"""Rules that scale a learning rate to another batch size, and to another width."""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..core.errors import LabError, did_you_mean
from ..core.ranges import COUNT, POSITIVE
from ..core.words import counted
from .entries import OPTIMIZERS
from .timescales import DecayTimescale, beta_of, half_life_of, rounded_updates, tau_of

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


class Settings(NamedTuple):
    """Settings that are known to be good for a base batch. Weight decay is decoupled from the gradient."""

    learning_rate: float
    beta2: float = 0.999
    weight_decay: float | None = None

    def at(self, batch: int, base: int) -> "Settings":
        """The settings for another batch: the rate by the rule "sqrt", beta2 and decay by their timescales in images."""
        rate = scaled_learning_rate(self.learning_rate, "sqrt", batch, base)
        beta2 = beta_of(half_life_of(self.beta2, base), batch)
        if self.weight_decay is None:
            return Settings(rate, beta2)
        decay = self.weight_decay * (batch / base) * (self.learning_rate / rate)  # the same tau
        return Settings(rate, beta2, decay)


def scaling_table(known: Settings, base_batch: int, batch: int | None = None) -> str:
    """A table of all rules for batches of an eighth to 64 times the base, and 1, with a row for `batch`."""
    batches = {max(1, round(base_batch * 2.0**power)) for power in range(-3, 7)} | {1} | ({batch} if batch else set())
    names = [name for name in SCALING_RULES if name != "none"]
    decay = "" if known.weight_decay is None else f"{'weight decay':>14}"
    lines = [f"{'batch':>10}" + "".join(f"{name:>12}" for name in names) + f"{'beta2':>12}" + decay]
    for size in sorted(batches):
        rates = [scaled_learning_rate(known.learning_rate, name, size, base_batch) for name in names]
        mark = "  <- this batch" if size == batch else "  base" if size == base_batch else ""
        own = known.at(size, base_batch)
        decay = "" if own.weight_decay is None else f"{own.weight_decay:>14.3g}"
        lines.append(f"{size:>10}" + "".join(f"{rate:>12.3g}" for rate in rates) + f"{own.beta2:>12.6g}{decay}{mark}")
    half_life = half_life_of(known.beta2, base_batch)
    lines += ["", *(f"{name:>10}  {SCALING_RULES[name].description}" for name in names)]
    lines += [
        f"{'beta2':>10}  a half-life of {half_life:,.0f} images (arXiv 2507.07101): adamw:beta2_half_life={half_life:.4g}"
    ]
    if known.weight_decay is not None:
        tau = tau_of(known.weight_decay, known.learning_rate, base_batch)
        lines += [f"{'decay':>10}  over {tau:,.0f} images at the rate of sqrt (arXiv 2405.13698): adamw:tau={tau:.4g}"]
    return "\n".join(lines)


def decay_in_words(known: Settings, base_batch: int, num_updates: int | None) -> str:
    """What the known weight decay does, in a run of so many updates at a constant rate if they are given."""
    rate, decay = known.learning_rate, known.weight_decay
    assert decay is not None
    words = f"At the rate {rate:.3g} and weight decay {decay:.3g}, "
    if num_updates is not None:
        return f"{words}{DecayTimescale.of(rate, decay, [rate] * num_updates).in_words(num_updates)}."
    return f"{words}weights are forgotten over {rounded_updates(tau_of(decay, rate, 1))} of {counted(base_batch, 'image')}."


def accumulation_in_words(known: Settings, base_batch: int, micro_batch: int, accumulation: int) -> str:
    """The cost of accumulation on one device: fewer updates, for less gradient noise, which a lower rate gives too."""
    alone, images = known.at(micro_batch, base_batch), micro_batch * accumulation
    return (
        f"On one device, accumulation makes 1 update of {counted(images, 'image')} in about the time of "
        f"{counted(accumulation, 'update')} of {micro_batch}. In arXiv 2507.07101 (language models), small batches were as "
        "good or better for the same number of tokens, with beta2 set by its half-life.\nTry --train_batch_size "
        f"{micro_batch} --gradient_accumulation_steps 1 --learning_rate {alone.learning_rate:.3g} --adam_beta2 "
        f"{alone.beta2:.6g}, and --max_train_steps multiplied by {accumulation}; the rate is that of sqrt, and should be "
        "tuned."
    )
