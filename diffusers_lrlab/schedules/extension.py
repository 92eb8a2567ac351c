"""How a run continues past its end: what a longer schedule means for it, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..core.errors import LabError, must_be
from ..core.progress import resolve_updates
from ..core.ranges import Range
from ..core.words import counted
from .continued import RunCurve, agreeing_updates, followed_by, last_update_on_plateau, rewarmed, rewound

TOLERANCE = 0.01  # of the peak, between the rates of a rewound run and those of the longer schedule
REWARM = 0.05  # of the added updates
_LEAST_LEVEL = 0.01  # of the peak, for another schedule to go on from


@dataclass(frozen=True)
class Extension:
    """The curve of an extended run, the checkpoint that it starts from, and what that means in words."""

    curve: RunCurve
    at: int
    meaning: str
    is_as_from_start: bool = False  # the rates are those of a run that had this length from its start


def choose_extension(
    curve: RunCurve,
    checkpoints: Collection[int],
    num_updates: int,
    rewarm: float | None = None,
    then: str | None = None,
    tolerance: float = TOLERANCE,
) -> Extension:
    """
    How a run continues to another length; a `LabError` if that is not possible as requested.

    Args:
        curve ([`RunCurve`]): Of the run so far, over the length that it had.
        checkpoints (`list` of `int`): The updates of its checkpoints, at least one.
        num_updates (`int`): The new length.
        rewarm (`float`, *optional*): Updates, or a fraction of the added ones, over which the rate rises to the same
            schedule over the new length.
        then (`str`, *optional*): A schedule that takes over at the last checkpoint.
        tolerance (`float`, *optional*, defaults to 0.01): Largest difference of earlier rates, as a share of the peak.
    """
    newest = max(checkpoints)
    Range("[0, 1]").check("--tolerance", tolerance, "it is a share of the peak learning rate")
    if num_updates <= newest:
        raise must_be(
            "--max_train_steps", num_updates, f"more than {newest}", "it counts from the start of the run, and its newest "
            f"checkpoint has done {counted(newest, 'update')}",
        )  # fmt: skip
    if rewarm is not None and then is not None:
        raise LabError(f"--rewarm {rewarm:g} and --then {then} exclude each other. Give one of them.")
    if then is not None:
        return _followed(curve, num_updates, newest, then)
    longer = curve.lasting(num_updates)
    agree = agreeing_updates(curve, longer)
    if rewarm is not None:
        return _rewarmed(curve, num_updates, newest, rewarm, agree)
    if equal := [update for update in sorted(checkpoints) if update <= agree]:
        where = "at all updates" if agree == min(curve.num_updates, num_updates) else f"up to update {agree}"
        meaning = f"{curve.text!r} has the same rates over {curve.num_updates} and {counted(num_updates, 'update')} {where}"
        return Extension(longer, equal[-1], meaning, is_as_from_start=True)
    near = agreeing_updates(curve, longer, tolerance)
    if close := [update for update in sorted(checkpoints) if update <= near]:
        at = close[-1]
        apart = max(abs(curve.lrs[:at] - longer.lrs[:at])) / curve.lr
        meaning = (
            f"rewound: before update {at} the rates of {curve.text!r} over {curve.num_updates} and "
            f"{counted(num_updates, 'update')} differ by at most {apart:.2g} of the peak; from there on it follows the "
            "longer one"
        )
        return Extension(rewound(curve, num_updates, at), at, meaning)
    raise _no_checkpoint(curve, longer, checkpoints, (agree, near), tolerance)


def _no_checkpoint(
    curve: RunCurve, longer: RunCurve, checkpoints: Collection[int], agree: tuple[int, int], tolerance: float
) -> LabError:
    oldest, newest = min(checkpoints), max(checkpoints)
    has, would = curve.lrs[newest - 1] / curve.lr, longer.lrs[newest] / curve.lr
    then = ", --then SPEC continues with another one" if has >= _LEAST_LEVEL else ""
    return LabError(
        f"--max_train_steps {longer.num_updates}: {curve.text!r} over this length matches the rates of the run only up to "
        f"update {agree[0]} ({agree[1]} within {tolerance:g} of the peak), and its oldest checkpoint is from update "
        f"{oldest}. At update {newest} the rate of the run is {has:.2g} of the peak, that of the longer schedule "
        f"{would:.2g}. Hint: --rewarm raises it to the longer schedule{then}; next time, --keep_every N keeps some to "
        "continue from."
    )


def _rewarmed(curve: RunCurve, num_updates: int, at: int, rewarm: float, agree: int) -> Extension:
    if agree >= at:
        raise LabError(
            f"--rewarm {rewarm:g} has no effect: {curve.text!r} has the same rates over both lengths up to update {at}, so "
            "it continues unchanged. Leave it out."
        )
    Range("(0, inf)").check("--rewarm", rewarm, "it counts updates, or is a fraction of the added ones")
    num_warmup = max(1, resolve_updates(rewarm, num_updates - at, "--rewarm"))
    if at + num_warmup >= num_updates:
        raise must_be("--rewarm", rewarm, f"less than {counted(num_updates - at, 'update')}", "the extension adds that many")
    new = rewarmed(curve, num_updates, at, num_warmup)
    end = float(new.lrs[at + num_warmup] / curve.lr)
    meaning = (
        f"re-warmed: over {counted(num_warmup, 'update')} from {curve.lrs[at - 1] / curve.lr:.2g} to {end:.2g} of the peak, "
        f"where {curve.text!r} over {counted(num_updates, 'update')} is at update {at + num_warmup}; it follows that "
        "schedule to the end"
    )
    return Extension(new, at, meaning)


def _followed(curve: RunCurve, num_updates: int, at: int, then: str) -> Extension:
    level = float(curve.lrs[at - 1] / curve.lr)
    if level < _LEAST_LEVEL:
        branched = "; or branch from a checkpoint before the decay" if last_update_on_plateau(curve) else ""
        raise LabError(
            f"--then {then}: it starts from the current rate, which after update {at - 1} is {level:.2g} of the peak, too "
            f"low to continue from. Hint: --rewarm raises it again{branched}."
        )
    meaning = (
        f"{then!r} takes over from {curve.text!r} at update {at}, over the rest of the run, from {level:.4g} of the peak"
    )
    return Extension(followed_by(curve, num_updates, at, then, level), at, meaning)


def rates_in_words(curve: RunCurve, at: int, factor: float = 1.0) -> str:
    """The first, highest and last rate from an update on, and the one before; all of them times `factor`."""
    rest = curve.lrs[at:] * factor
    highest = at + int(rest.argmax())
    return (
        f"{rest[0]:.4g} first (update {at}), {rest.max():.4g} highest (update {highest}), {rest[-1]:.4g} last "
        f"(update {curve.num_updates - 1}); {curve.lrs[at - 1] * factor:.4g} before"
    )
