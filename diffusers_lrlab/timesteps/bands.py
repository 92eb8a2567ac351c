"""A learning rate for each band of noise levels, in two forms.

`weight` multiplies the losses of each band. Under SGD that is a learning rate per noise level; Adam divides a gradient by
its running size, so that a common factor of all bands cancels and only their ratios count. `banded` takes all timesteps of
an update from one band and does the update at that band's rate, which works with any optimizer; the clock chooses the band.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.progress import Progress
from ..core.registry import Parameter, Registry
from ..core.words import counted
from .noise_levels import NoiseLevels
from .registries import TIMESTEP_SAMPLERS

_EDGES = Parameter(
    "edges", list, (), "edges between the bands, increasing, as shares of the timesteps; bands of equal width if not given",
    "(0, 1)",
)  # fmt: skip
TIMESTEP_LRS = Registry(
    "per-timestep learning rate",
    common=(
        Parameter("factors", list, (), "a factor for each band, from the least to the most noise; required", "(0, inf)"),
        _EDGES,
    ),
)
TIMESTEP_LRS.register(
    "weight",
    description="the losses of a band times its factor: under Adam, only the ratios of the factors matter",
    source="loss weighting; under SGD a learning rate",
)(None)
TIMESTEP_LRS.register(
    "banded",
    description=(
        "each update takes its timesteps from one band, and its learning rate is multiplied by the factor of that band"
    ),
    source="own",
)(None)


def band_edges(num_bands: int, edges: list[float], num_train_timesteps: int) -> np.ndarray:
    """The first timestep of each band, and T: int64 of shape `(num_bands + 1,)`."""
    if num_bands < 1:
        raise LabError("A learning rate per timestep needs factors, one for each band, such as factors=[0.5|1|2].")
    if edges and len(edges) != num_bands - 1:
        raise LabError(
            f"{counted(num_bands, 'band')} meet at {num_bands - 1} edges, not at the {len(edges)} of edges={edges}."
        )
    shares = edges or [band / num_bands for band in range(1, num_bands)]
    starts = np.array([0, *(round(share * num_train_timesteps) for share in shares), num_train_timesteps])
    if (np.diff(starts) < 1).any():
        raise LabError(
            f"A band without timesteps: of {counted(num_train_timesteps, 'timestep')}, the bands begin at "
            f"{starts[:-1].tolist()}. Give increasing edges, or fewer bands."
        )
    return starts


def band_of_update(update: Any, starts: np.ndarray) -> Any:
    """
    The band that an update takes its timesteps from: int, or an array for an array of updates.

    Bands follow a golden-ratio sequence: in every stretch of the run each comes in proportion to its width, without a period
    that could coincide with one of the data or the schedule.
    """
    phase = (np.asarray(update, np.int64) + 1) * 2654435769 % 2**32 / 2**32
    return np.searchsorted(starts / starts[-1], phase, side="right") - 1


@TIMESTEP_SAMPLERS.register(
    "banded",
    description="uniform within one of several bands at each update; the bands take turns",
    source="own",
    parameters=(Parameter("num_bands", int, 4, "how many", "[1, inf)"), _EDGES),
    traits=("restricted",),
)
def banded(progress: Progress, levels: NoiseLevels, num_bands: int, edges: list[float]) -> np.ndarray:
    starts = band_edges(num_bands, edges, levels.num_train_timesteps)
    band = band_of_update(progress.update, starts)[..., None]
    t = np.arange(levels.num_train_timesteps)
    return ((t >= starts[band]) & (t < starts[band + 1])).astype(np.float64)


@contextmanager
def scaled_lr(optimizer: Any, factor: float | None) -> Iterator[None]:
    """Multiplies the learning rates of an optimizer by `factor` inside this block, and restores them after it."""
    if factor is None:
        yield
        return
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr * factor
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr


@dataclass(frozen=True)
class TimestepLR:
    """A learning rate per noise level, with all its parameters."""

    form: str  # "weight" or "banded"
    factors: list[float]  # for each band
    edges: list[float] = field(default_factory=list)  # where bands meet; empty for bands of equal width

    def weights(self, num_train_timesteps: int) -> np.ndarray | None:
        """Factors on the losses, of shape `(T,)`; `None` for bands with rates of their own."""
        return np.repeat(self.factors, np.diff(self._starts(num_train_timesteps))) if self.form == "weight" else None

    def lr_factors(self, updates: np.ndarray, num_train_timesteps: int) -> np.ndarray | None:
        """Factors on the learning rates of updates, of their shape; `None` for weights."""
        if self.form == "weight":
            return None
        return np.asarray(self.factors)[band_of_update(updates, self._starts(num_train_timesteps))]

    def _starts(self, num_train_timesteps: int) -> np.ndarray:
        return band_edges(len(self.factors), self.edges, num_train_timesteps)
