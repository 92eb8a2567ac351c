"""What the optimizer really had at each update, against what its schedule promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import LabError

# Rounding aside: a closed form and a chain of multiplications differ by some 1e-13 after thousands of updates.
TOLERANCE = 1e-9


@dataclass
class ScheduleAudit:
    """
    Compares learning rate and momentum at every update.

    Args:
        strict (`bool`, *optional*, defaults to `False`): Whether the first deviation is an error.
    """

    strict: bool = False
    num_updates: int = 0
    largest_lr_deviation: float = 0.0
    largest_momentum_deviation: float = 0.0
    first_deviating_update: int | None = None

    def check(
        self,
        update: int,
        applied: Sequence[tuple[float, float | None]],
        promised: Sequence[tuple[float | None, float | None]],
        peaks: Sequence[float],
    ) -> None:
        """
        Compares one update.

        Args:
            update (`int`): The clock.
            applied: Learning rate and momentum (`None` without one) of each parameter group, as the optimizer has them.
            promised: The same, as the schedule has them; `None` for what does not follow the clock.
            peaks: The learning rate of each group that deviations are relative to.

        Raises:
            LabError: for a deviation, if strict.
        """
        self.num_updates += 1
        for (lr, momentum), (asked_lr, asked_momentum), peak in zip(applied, promised, peaks, strict=True):
            lr_deviation = abs(lr - asked_lr) / peak if asked_lr is not None else 0.0
            momentum_deviation = abs((momentum or 0.0) - asked_momentum) if asked_momentum is not None else 0.0
            self.largest_lr_deviation = max(self.largest_lr_deviation, lr_deviation)
            self.largest_momentum_deviation = max(self.largest_momentum_deviation, momentum_deviation)
            if max(lr_deviation, momentum_deviation) <= TOLERANCE or self.first_deviating_update is not None:
                continue
            self.first_deviating_update = update
            if self.strict:
                beta = "" if asked_momentum is None else f", momentum {momentum:.6g} instead of {asked_momentum:.6g}"
                raise LabError(
                    f"At update {update} the optimizer has a learning rate of {lr:.6g} where the schedule promised "
                    f"{asked_lr}{beta} (--strict_lr_audit). Something else sets it, or steps the schedule by another "
                    "clock."
                )

    @property
    def passed(self) -> bool:
        """Whether everything was as promised."""
        return self.first_deviating_update is None

    def summary(self) -> str:
        """One line about the whole run."""
        if self.passed:
            return f"LR audit: {self.num_updates} updates, every value that follows the clock was as promised."
        return (
            f"LR audit: {self.num_updates} updates, NOT as promised from update {self.first_deviating_update} on: the "
            f"learning rate was off by up to {self.largest_lr_deviation:.3g} of its peak"
            + (f", the momentum by up to {self.largest_momentum_deviation:.3g}" if self.largest_momentum_deviation else "")
            + "."
        )

    def state_dict(self) -> dict[str, Any]:
        """The findings so far, as data."""
        return {key: value for key, value in asdict(self).items() if key != "strict"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from earlier findings."""
        for key, value in state.items():
            setattr(self, key, value)
