"""
Settings of optimizers in images, for runs with other batches: timescales, which stay the same, and learning rates.

The decay of a mean is given by its half-life, so that it covers the same number of images at any batch size (arXiv
2507.07101): beta = 2^(-images_per_update / half_life). Decoupled weight decay shrinks weights by the learning rate
times `weight_decay` at each update, so that a share 1/e is left after the timescale tau (arXiv 2405.13698):
weight_decay = images_per_update / (learning_rate * tau).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.errors import LabError, must_be
from ..core.registry import Entry, Parameter
from ..core.values import COUNT, POSITIVE
from ..core.words import counted

MOST_IMAGES = "(0, 1e15]"  # beyond it, a beta rounds to 1
IMAGES_PER_UPDATE = "images_per_update"
BASE_BATCH = 64  # images of an update that --learning_rate is meant for, with --scale_lr
NO_EFFECT, SHORT = 0.01, 0.01  # share of the weights that decay removes; of the run that they are remembered for

BETA2_HALF_LIFE = Parameter(
    "beta2_half_life",
    float,
    None,
    "in place of beta2: images after which half of that mean is forgotten",
    MOST_IMAGES,
    instead_of="beta2",
)
TAU = Parameter(
    "tau",
    float,
    None,
    "in place of weight_decay: images over which it shrinks a weight to 1/e at the given learning rate",
    MOST_IMAGES,
    instead_of="weight_decay",
)
IMAGES = Parameter(
    IMAGES_PER_UPDATE,
    int,
    None,
    "effective batch size, for parameters in images; known in `lrlab train`, elsewhere required",
    "[1, 1e9]",
    is_added=True,
)
_IN_IMAGES = (BETA2_HALF_LIFE, TAU)


def beta_of(half_life: float, images_per_update: int) -> float:
    """The decay of a mean at each update, of which half is left after `half_life` images."""
    return float(2.0 ** (-images_per_update / half_life))


def half_life_of(beta: float, images_per_update: int) -> float:
    """The images after which half of a mean with this decay is left; 0 for no mean."""
    return -images_per_update / math.log2(beta) if beta else 0.0


def weight_decay_of(tau: float, learning_rate: float, images_per_update: int, of: str = "") -> float:
    """The decoupled weight decay that shrinks a weight to 1/e over `tau` images at a learning rate."""
    POSITIVE.check("lr", learning_rate, "tau is a timescale at the learning rate, which multiplies the decay")
    if tau < images_per_update:
        wanted = f"at least the {counted(images_per_update, 'image')} of an update"
        raise must_be(TAU.name, tau, wanted, "it counts images; weights would be gone after an update", of=of)
    return images_per_update / (learning_rate * tau)


def per_update(
    entry: Entry, kwargs: Mapping[str, Any], learning_rate: float, images_per_update: int | None
) -> dict[str, Any]:
    """
    The resolved parameters of an optimizer with `beta2` and `weight_decay` in place of those that count images. Their own
    `images_per_update` precedes the argument; `learning_rate` is the peak of the schedule.

    Raises a `LabError` if the images of an update are unknown, and for a `tau` of less than an update.
    """
    found, name = dict(kwargs), entry.name
    if IMAGES not in entry.parameters:
        return found
    own = found.pop(IMAGES_PER_UPDATE, None)
    given = {each.name: value for each in _IN_IMAGES if (value := found.pop(each.name, None)) is not None}
    if not given:
        if own is not None:
            needed = " or ".join(parameter.name for parameter in _IN_IMAGES if parameter in entry.parameters)
            raise LabError(f"{name!r} got {IMAGES_PER_UPDATE}={own}, which has no effect without {needed}. Drop it.")
        return found
    images = images_per_update if own is None else own
    if images is None:
        key, value = next(iter(given.items()))
        raise LabError(
            f"{name!r} got {key}={value:g} without {IMAGES_PER_UPDATE}. Add {IMAGES_PER_UPDATE}=N (batch size x "
            "accumulation x processes)."
        )
    COUNT.check(IMAGES_PER_UPDATE, images, "it is the batch size x accumulation x processes")
    if BETA2_HALF_LIFE.name in given:
        found["beta2"] = beta_of(given[BETA2_HALF_LIFE.name], images)
    if TAU.name in given:
        found["weight_decay"] = weight_decay_of(given[TAU.name], learning_rate, images, repr(name))
    return found


def scaled_learning_rate(learning_rate: float, rule: str, batch: int, base_batch: int = BASE_BATCH) -> float:
    """The learning rate for a global batch by a rule of `--scale_lr`, given that for the base batch."""
    ratio = batch / base_batch
    return learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def scaling_warning(rule: str, optimizer: Entry) -> str | None:
    """A warning if the rule was derived for another type of optimizer, else `None`."""
    if rule != "linear" or "sgd" in optimizer.traits:
        return None
    return (
        f"--scale_lr linear is a rule for SGD (arXiv 1706.02677). For {optimizer.name}, which normalises gradients, the "
        "derived rule is sqrt (arXiv 2205.10287)."
    )


class DecayTimescale(NamedTuple):
    """What decoupled weight decay does in a run."""

    updates: float  # at the peak rate, over which a weight shrinks to 1/e
    removed: float  # the share of a weight that decay removes by the end

    @classmethod
    def of(cls, learning_rate: float, weight_decay: float, lrs: Any) -> "DecayTimescale":
        """The effect of a peak rate and of the rates of all updates, an array."""
        import numpy as np

        shares = np.clip(1 - np.asarray(lrs, dtype=np.float64) * weight_decay, 0.0, None)
        return cls(1 / (learning_rate * weight_decay), float(1 - np.prod(shares)))

    def in_words(self, num_updates: int) -> str:
        """The number of updates over which weights are forgotten, and its effect in a run, in words."""
        updates = round(float(f"{self.updates:.4g}"))  # rates and decays are rarely known better
        words = f"weights are forgotten over {counted(updates, 'update', ',')}, in a run of {num_updates:,}"
        if self.removed < NO_EFFECT:
            return f"{words}: the decay does nothing"
        if self.updates < SHORT * num_updates:
            return f"{words}: they remember only its last updates"
        return f"{words}: the decay removes {100 * self.removed:.2g} % of the first weights"
