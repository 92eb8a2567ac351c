"""When a density that waits for enough losses of every noise level is expected to begin."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import LabError
from ..core.words import counted

LIKELY = 0.9  # the chance from which on a beginning is expected
_LONGEST = 10**12  # updates


@dataclass(frozen=True)
class Guards:
    """
    Guards of a density: from update `warmup_updates` on, a multiple of `refresh_every`, it begins once every part of the
    noise levels has had `min_count` losses. `masses`, float64 of shape `(parts,)`, are the probabilities of the parts until
    then.
    """

    masses: np.ndarray
    min_count: int
    warmup_updates: int
    refresh_every: int

    def chance(self, images: float) -> float:
        """
        The probability that every part has `min_count` of the losses of `images` independent draws.

        Counts are taken for independent ones of Poisson distributions, which for many parts is close.
        """
        from scipy.special import gammainc  # slow to import, and most samplers have no guards

        if images < self.min_count * len(self.masses):
            return 0.0
        return float(np.prod(gammainc(self.min_count, images * self.masses)))

    @cached_property
    def first_refresh(self) -> int:
        """The first update at which the density may begin."""
        return max(1, -(-self.warmup_updates // self.refresh_every)) * self.refresh_every

    def update_of(self, chance: float, batch_size: int) -> int | None:
        """The first update by which it has begun with this probability; `None` if it never does."""
        if (self.masses <= 0).any():
            return None
        every = self.refresh_every
        low, high = self.first_refresh // every - 1, _LONGEST // every + 1  # in refreshes; reached after `low`, by `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.chance(middle * every * batch_size) >= chance else (middle, high)
        return high * every if high * every <= _LONGEST else None


@dataclass(frozen=True)
class Beginning:
    """
    The forecast for a run of `num_updates` updates of `batch_size` images.

    `update` is the one by which half of such runs have begun, which may be after the run, and `chance` the probability
    that a run begins in time for one more update.
    """

    guards: Guards
    batch_size: int
    num_updates: int

    @cached_property
    def update(self) -> int | None:
        return self.guards.update_of(0.5, self.batch_size)

    @cached_property
    def last_refresh(self) -> int:
        """The last update after which a new density is still drawn from."""
        every = self.guards.refresh_every
        return (self.num_updates - 1) // every * every

    @cached_property
    def chance(self) -> float:
        if self.last_refresh < self.guards.first_refresh:
            return 0.0
        return self.guards.chance(self.last_refresh * self.batch_size)

    def check(self, name: str, before: str) -> None:
        """Raises a `LabError` if the density cannot begin in this run, whichever timesteps are drawn."""
        if why := self._why_never(before):
            raise LabError(
                f"--timestep_sampler {name}: must be able to begin in {counted(self.num_updates, 'update')} of "
                f"{counted(self.batch_size, 'image')}, but {why}. Hint: {self._remedy()}, or use {before} itself."
            )

    def _why_never(self, before: str) -> str:
        guards, seen = self.guards, self.last_refresh * self.batch_size
        if empty := int((guards.masses <= 0).sum()):
            return f"{before} never draws {empty} of its {counted(len(guards.masses), 'part')}"
        if self.last_refresh < guards.first_refresh:
            return f"its first density is due at update {guards.first_refresh} (warmup_updates, refresh_every)"
        if seen < (needed := guards.min_count * len(guards.masses)):
            parts = f"{counted(len(guards.masses), 'part')} with {counted(guards.min_count, 'loss')} each"
            return f"{parts} take {counted(needed, 'image', ',')}, but {seen:,} are seen before its last update"
        return ""

    def warning(self, name: str, before: str) -> str | None:
        """A warning if it is not likely to begin in the run."""
        if self.chance >= LIKELY:
            return None
        when = "half of all runs begin later than can be computed"
        if self.update is not None:
            when = f"with {counted(self.batch_size, 'image')} an update, half of all runs begin by update {self.update:,}"
        return (
            f"{name!r} keeps the density {before} until its warm-up is over and every part of ln sigma has "
            f"{counted(self.guards.min_count, 'loss')}: {when}. This run has {counted(self.num_updates, 'update', ',')} and "
            f"begins with a probability of {_percent(self.chance)}. Hint: {self._remedy()}."
        )

    def _remedy(self) -> str:
        """What lets it begin by the middle of the run, as far as one parameter can."""
        guards, middle = self.guards, self.num_updates // 2
        if (guards.masses <= 0).any():
            return "choose a density before it that draws every noise level"
        if guards.first_refresh > middle:
            return f"lower warmup_updates and refresh_every to {max(1, middle // 2)} or less, or train for longer"
        low, high = 0, guards.min_count  # the largest count that is enough, in [low, high)
        while high - low > 1:
            count = (low + high) // 2
            by = Guards(guards.masses, count, guards.warmup_updates, guards.refresh_every).update_of(LIKELY, self.batch_size)
            low, high = (count, high) if by is not None and by <= middle else (low, count)
        if low:
            return f"set min_count={low}, with which it begins by the middle of the run, lower num_bins, or train for longer"
        return "lower num_bins, or train for longer or with larger batches"


def _percent(chance: float) -> str:
    return "below 1 %" if chance < 0.01 else f"{100 * chance:.0f} %"
