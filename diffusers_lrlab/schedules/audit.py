"""Audit of the optimizer's learning rate and momentum at each update against the schedule."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import LabError
from ..core.words import counted

# For rounding: a closed form and a chain of multiplications differ by about 1e-13 after thousands of updates.
TOLERANCE = 1e-9


def deviation(applied: Any, expected: Any, peak: Any = 1.0) -> Any:
    """How far numbers or arrays are from the expected ones, relative to `peak`, which is 0 for a frozen group."""
    return abs(applied - expected) / (peak or 1.0)


@dataclass
class ScheduleAudit:
    """Compares applied and expected learning rates and momenta at every update."""

    strict: bool = False  # the first deviation is an error
    num_updates: int = 0
    largest_lr_deviation: float = 0.0
    largest_momentum_deviation: float = 0.0
    first_deviating_update: int | None = None
    rounding: float = 0.0  # relative, of values that the optimizer keeps in tensors

    def check(
        self,
        update: int,
        applied: Sequence[tuple[float, float | None]],
        expected: Sequence[tuple[float | None, float | None]],
        peaks: Sequence[float],
        rounding: float = 0.0,
    ) -> None:
        """
        Compares learning rate and momentum of each parameter group at one update.

        `applied` are the optimizer's values. `expected` is `None` for values that do not follow the clock. Deviations of
        the learning rate are relative to `peaks`, which are 0 for frozen groups. `rounding` is that of [`rounding_of`].
        """
        self.num_updates += 1
        self.rounding = max(self.rounding, rounding)
        for (lr, momentum), (expected_lr, expected_momentum), peak in zip(applied, expected, peaks, strict=True):
            lr_deviation = deviation(lr, expected_lr, peak) if expected_lr is not None else 0.0
            momentum_deviation = deviation(momentum or 0.0, expected_momentum) if expected_momentum is not None else 0.0
            self.largest_lr_deviation = max(self.largest_lr_deviation, lr_deviation)
            self.largest_momentum_deviation = max(self.largest_momentum_deviation, momentum_deviation)
            if max(lr_deviation, momentum_deviation) <= max(TOLERANCE, rounding) or self.first_deviating_update is not None:
                continue
            self.first_deviating_update = update
            if self.strict:
                beta = "" if expected_momentum is None else f", momentum {momentum:.6g} instead of {expected_momentum:.6g}"
                raise LabError(
                    f"At update {update} the optimizer has a learning rate of {lr:.6g} where the schedule expects "
                    f"{expected_lr}{beta} (--strict_lr_audit). Other code sets it, or steps the schedule at other times."
                )

    @property
    def passed(self) -> bool:
        return self.first_deviating_update is None

    def summary(self) -> str:
        if self.passed:
            rounded = f", within the rounding of the optimizer's tensors ({self.rounding:.2g})" if self.rounding else ""
            num = counted(self.num_updates, "update")
            return f"LR audit: {num}, every value that follows the clock was as expected{rounded}."
        return (
            f"LR audit: {counted(self.num_updates, 'update')}, NOT as expected from update {self.first_deviating_update} "
            f"on: the learning rate was off by up to {self.largest_lr_deviation:.3g} of its peak"
            + (f", the momentum by up to {self.largest_momentum_deviation:.3g}" if self.largest_momentum_deviation else "")
            + "."
        )

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "strict"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
