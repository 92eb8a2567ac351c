"""Arms against controls of their own: whether an idea does more than the half of it that its control keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .statistics import add_holm

Rows = list[dict[str, Any]]


def against_controls(
    pairs: Iterable[tuple[str, str]], compare: Callable[[str, str], Rows], describe: Callable[[Rows, str], list[str]]
) -> tuple[Rows, list[str]]:
    """
    One measure of arms, each beside its control instead of the baseline.

    The family of Holm's correction is all of these comparisons; that of the comparisons with the baseline is another, so
    that asking for controls changes nothing there.

    Args:
        pairs (`list` of `tuple`): Arms, each with a control.
        compare (`Callable`): From an arm and its control to the rows of both, as `compare` and `speedups` make them with
            the control as the baseline.
        describe (`Callable`): From the rows of a pair and the control to sentences.

    Returns:
        `tuple`: the rows of the arms, with the key "control", and the sentences.
    """
    found = [(control, compare(arm, control)) for arm, control in pairs]
    rows = []
    for control, of_pair in found:
        for row in of_pair:
            if row["arm"] != control:
                row["control"] = control
                rows.append(row)
    add_holm(rows)
    return rows, [sentence for control, of_pair in found for sentence in describe(of_pair, control)]
