"""InfoNoise: a density over ln sigma from the losses of a run, arXiv 2602.18647.

By the I-MMSE identity, the entropy of the data given data + sigma * noise rises with ln sigma at the rate
`mmse(sigma) / sigma^2`, where mmse is the squared error of the best prediction of the data. The model's own error stands
for it. The density is such that density times weight of that error is this rate, without the noise levels below a pivot c:

    density(ln sigma) ~ error / sigma^2 * sigma^3 / (sigma^3 + c^3) / weight
    c = the largest sigma where error / sigma^3 is above `onset` times its maximum
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core.errors import LabError, must_be
from ..core.progress import Progress
from ..core.spec import choose, format_spec
from ..core.words import counted
from .adaptive import finite_losses
from .noise_levels import LogSigma, NoiseLevels, find_prediction
from .registries import TIMESTEP_SAMPLERS

_SMALLEST = 1e-30  # of an error whose logarithm is taken
_DIGITS = 4  # of the densities of a spec string
_SOONER = "lower min_count, num_bins, warmup_updates or refresh_every, or train for longer or with larger batches"
_TENSORS = ("sums", "counts", "means", "density", "is_adapted", "began")


class InfoNoise:
    """
    A density over ln sigma, constant in each of `num_bins` equal parts, that follows the losses.

    The mean error of a bin enters its moving average at a refresh, every `refresh_every` updates, if it is over `min_count`
    images or more. The density is computed there, from update `warmup_updates` and from the first average of every bin on.
    """

    def __init__(
        self,
        levels: NoiseLevels,
        num_bins: int,
        warmup_updates: int,
        refresh_every: int,
        min_count: int,
        ema_decay: float,
        onset: float,
        uniform_share: float,
        before: str,
        device: Any = None,
    ):
        self.warmup_updates, self.refresh_every, self.min_count = warmup_updates, refresh_every, min_count
        self.ema_decay, self.onset, self.uniform_share = ema_decay, onset, uniform_share
        self.levels, self.device = levels, device
        log_sigma = LogSigma(levels)
        edges = log_sigma.edges(num_bins)
        self.low, self.high, centres = float(edges[0]), float(edges[-1]), (edges[1:] + edges[:-1]) / 2
        bins = np.full(levels.num_train_timesteps, -1)
        bins[log_sigma.timesteps] = np.clip(np.searchsorted(edges, log_sigma.values, side="right") - 1, 0, num_bins - 1)
        filled = np.unique(bins[bins >= 0])
        places = np.array([log_sigma.values[bins[log_sigma.timesteps] == number].mean() for number in filled])
        self.shares = self._tensor(log_sigma.overlaps(edges))
        self.bins, self.filled = (torch.from_numpy(each).to(device) for each in (bins, filled))
        self.centres, self.places = self._tensor(centres), self._tensor(places)  # ln sigma of bins, and of their timesteps
        self.numbers = torch.arange(num_bins, device=device)
        # Logarithms of entropy rates and weights are linear in ln sigma between bins and between timesteps.
        self.from_bins = self._tensor(_interpolation(centres, places))
        self.timesteps = torch.from_numpy(log_sigma.timesteps).to(device)
        self.from_timesteps = self._tensor(_interpolation(centres, log_sigma.values))
        self.before = self._tensor(_fixed_density(before, levels))
        self.losses_are("epsilon")
        self.sums, self.counts, self.means, self.density = (
            torch.zeros(num_bins, dtype=torch.float64, device=device) for _ in range(4)
        )
        self.is_adapted = torch.zeros((), dtype=torch.bool, device=device)
        self.began = torch.zeros((), dtype=torch.int64, device=device)  # the update of the first density; 0 before it
        self.num_updates = 0

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, torch.float64)

    def losses_are(self, prediction_type: str, table: Callable[[], torch.Tensor] | None = None) -> None:
        """The losses that follow are squared errors of a prediction, times `table()`, of shape `(T,)`, if given."""
        self._errors = self._tensor(find_prediction(prediction_type).error(self.levels.snr))
        self._table = table

    def weights(self) -> torch.Tensor:
        """The weights that the losses have on the squared error of the data: float64 of shape `(T,)`."""
        return self._errors if self._table is None else self._errors * self._table().to(self._errors)

    def probabilities(self) -> torch.Tensor:
        """float64 of shape `(T,)` on the device."""
        mass, share = self.shares @ self.density, self.uniform_share
        adapted = (1 - share) * mass / mass.sum().clamp(min=1e-300) + share / len(mass)
        return torch.where(self.is_adapted, adapted, self.before)

    @torch.no_grad()
    def observe(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds the losses of an update to their bins, and refreshes the density if it is time."""
        losses, usable = finite_losses(losses, timesteps)
        all_weights = self.weights()
        weights, bins = all_weights[timesteps], self.bins[timesteps]
        usable = usable & (weights > 0)
        errors = torch.where(usable, losses.double() / weights, 0.0)
        # A product in place of index_add_, which on a GPU adds in any order.
        members = ((bins == self.numbers[:, None]) & usable).double()
        self.sums += members @ errors
        self.counts += members.sum(dim=1)
        self.num_updates += 1
        if self.num_updates % self.refresh_every == 0:
            self._average()
            if self.num_updates >= self.warmup_updates:
                self._refresh(all_weights)

    def _average(self) -> None:
        """Moves the means of bins with enough losses into their moving averages."""
        enough, new = self.counts >= self.min_count, self.sums / self.counts.clamp(min=1)
        moved = torch.where(self.means > 0, self.ema_decay * self.means + (1 - self.ema_decay) * new, new)
        self.means = torch.where(enough, moved.clamp(min=_SMALLEST), self.means)
        self.sums, self.counts = (torch.where(enough, 0.0, each) for each in (self.sums, self.counts))

    def _refresh(self, weights: torch.Tensor) -> None:
        trained = (self.bins == self.numbers[:, None]) & (weights > 0)
        density = self._density(weights)
        is_ready = ((self.means > 0) | ~trained.any(dim=1)).all() & density.isfinite().all() & (density > 0).any()
        self.density = torch.where(is_ready, density, self.density)
        self.began = torch.where(is_ready & ~self.is_adapted, self.num_updates, self.began)
        self.is_adapted = self.is_adapted | is_ready

    def _density(self, weights: torch.Tensor) -> torch.Tensor:
        """The density of each bin over ln sigma, whose sum over the bins is 1."""
        weights = weights[self.timesteps]
        log_errors = self.means[self.filled].clamp(min=_SMALLEST).log()
        log_weights = self.from_timesteps @ weights.clamp(min=_SMALLEST).log()
        gates = torch.sigmoid(3 * (self.centres - self._pivot(log_errors)))  # sigma^3 / (sigma^3 + c^3)
        log_rates = self.from_bins @ (log_errors - 2 * self.places)
        found = (log_rates - log_weights).softmax(dim=0) * gates
        found = torch.where(self.from_timesteps @ (weights > 0).double() < 1 - 1e-9, 0.0, found)
        return found / found.sum()

    def _pivot(self, log_errors: torch.Tensor) -> torch.Tensor:
        """The logarithm of c, from those of the errors of the filled bins."""
        heights = log_errors - 3 * self.places
        above = heights > heights.max() + math.log(self.onset)
        return torch.where(above, self.places, -math.inf).max()

    def held(self) -> str:
        """The spec string of a sampler with the current density, fixed; empty before the first one."""
        if not self.is_adapted:
            return ""
        densities = [float(f"{value:.{_DIGITS}g}") for value in (self.density * len(self.density)).tolist()]
        low, high = (round(each, 6) for each in (self.low, self.high))
        return format_spec(
            "piecewise", {"densities": densities, "low": low, "high": high, "uniform_share": self.uniform_share}
        )

    def check_length(self, name: str, before: str, num_updates: int, batch_size: int) -> str | None:
        """
        Raises a `LabError` if the first density cannot begin in a run, whichever timesteps are drawn before; returns a
        warning if it is not likely to. It waits for losses of every part that has a weight.
        """
        trained = self.weights() > 0
        parts = [(self.bins == number) & trained for number in self.filled]
        masses = [float(self.before[part].sum()) for part in parts if part.any()]
        first = max(1, -(-self.warmup_updates // self.refresh_every)) * self.refresh_every
        last = (num_updates - 1) // self.refresh_every * self.refresh_every
        needed = f"{counted(len(masses), 'part')} with {counted(self.min_count, 'loss')} each"
        if last < first or last * batch_size < self.min_count * len(masses) or not min(masses):
            remedy = _SOONER if min(masses) else "give `before` a density above 0 in every part"
            raise LabError(
                f"--timestep_sampler {name}: must be able to begin in {counted(num_updates, 'update')} of "
                f"{counted(batch_size, 'image')}, but it needs {needed} under the density {before}, and update {first}. "
                f"Hint: {remedy}, or use {before} itself."
            )
        rarest = last * batch_size * min(masses)
        if rarest >= 2 * self.min_count:
            return None
        return (
            f"{name!r} keeps the density {before} until it has {needed}, and this run gives the rarest part about "
            f"{rarest:.3g}: its own density may never begin. Hint: {_SOONER}."
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        own = {name: getattr(self, name).clone() for name in _TENSORS}
        return own | {"num_updates": torch.tensor(self.num_updates)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in _TENSORS:
            own = getattr(self, name)
            setattr(self, name, state.get(name, torch.zeros_like(own)).to(own).clone())  # older states have no `began`
        self.num_updates = int(state["num_updates"])


def _interpolation(at: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The matrix that interpolates values at `known` linearly at other positions; beyond the ends they stay."""
    return np.stack([np.interp(at, known, row) for row in np.eye(len(known))], axis=1)


def _fixed_density(spec: str, levels: NoiseLevels) -> np.ndarray:
    """The probabilities of timesteps of a sampler that stays as it is, by its spec string."""
    choice = choose(spec, None, TIMESTEP_SAMPLERS)
    entry, kwargs = choice.entry, choice.kwargs
    if entry.traits & {"feedback", "curriculum", "restricted"} or kwargs["unbiased"] or kwargs["draw"] != "independent":
        wanted = "a density that does not change and draws every timestep, without draw and unbiased"
        raise must_be("before", spec, wanted, "such as uniform or logit_normal:mean=0.8", of="'infonoise'")
    own = {key: value for key, value in kwargs.items() if key not in ("draw", "unbiased")}
    weights = np.asarray(entry(Progress(0, 1), levels, **own), np.float64)
    return np.asarray(weights / weights.sum())
