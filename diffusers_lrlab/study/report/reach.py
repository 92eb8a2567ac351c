"""The strength of a report's evidence: noise between seeds, power, agreement of data sets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ...core.words import agreeing, counted
from ...evaluation.metrics import metric_label
from ..analysis.figures import NONE, percent
from ..analysis.verdicts import CANNOT_TELL, Verdict
from .answers import MOST_NAMES, answers, listed
from .formats import Table

Row = Mapping[str, Any]


def power_table(rows: Sequence[Row]) -> Table:
    """Noise and detectable differences by metric and data set."""
    cells = [
        {
            "metric": metric_label(row["metric"]), "data set": row["dataset"], "seeds": f"{row['seeds']}",
            "noise between seeds": _between(row, "noise"), "detectable difference": _between(row, "detectable"),
        }
        for row in rows
    ]  # fmt: skip
    note = (
        "Noise: the standard deviation between seeds as a share of the mean, lowest and highest of the arms. "
        "Detectable: the smallest true difference, as a share of the baseline's mean, that the adjusted test shows with a "
        "probability of 80 %, even if no other comparison shows one. Both are estimates from few seeds."
    )
    return Table("power", "Noise and power", pd.DataFrame(cells), note, 2)


def reach(summary: dict[str, Any], metric: str, verdicts: Iterable[Verdict]) -> list[str]:
    """Sentences on noise, power and data sets, by the primary metric; none where nothing was compared."""
    rows = [row for row in summary.get("power") or [] if row["metric"] == metric]
    noise, seen = _over(rows, "noise"), _over(rows, "detectable")
    num_seeds = max((row["seeds"] for row in rows), default=0)
    seeds = counted(num_seeds, "seed")
    sentences = []
    if noise:
        sentences.append(
            f"Noise: between seeds, the standard deviation is {_span(*noise)} of the mean, depending on the arm."
        )
    if seen:
        depending = ", depending on arm and data set" if seen[0] < seen[1] else ""
        sentences.append(
            f"Power: {seeds} {agreeing(num_seeds, 'shows', 'show')} differences of {_span(*seen)} with a probability of 80 %"
            f"{depending}; smaller ones may be missed."
        )
    return sentences + _agreement(summary["study"], list(verdicts))


def _agreement(study: dict[str, Any], verdicts: list[Verdict]) -> list[str]:
    tested = [answer for answer in answers(verdicts) if any(answer.words.values())]
    if not tested:
        return []
    if len(study["datasets"]) == 1:
        return [f"Data sets: one, {study['datasets'][0]}. Whether the answers hold on others was not tested."]
    differing = [answer for answer in tested if len({*answer.words.values()}) > 1]
    same = f"{len(tested) - len(differing)} of {counted(len(tested), 'comparison')}"
    unclear = sum({*answer.words.values()} == {CANNOT_TELL} for answer in tested)
    text = f"Data sets: the verdict is the same on all for {same}"
    text += f" (“{CANNOT_TELL}” for {unclear} of these)" if unclear else ""
    names = [f"{answer.arm} against {answer.reference}" for answer in differing]
    shown = listed(names) if 0 < len(names) <= MOST_NAMES else f"the other {len(names)}"
    return [text + (f"; it differs for {shown}." if names else ".")]


def _between(row: Row, name: str) -> str:
    found = _over([row], name)
    return _span(*found) if found else NONE


def _over(rows: Iterable[Row], name: str) -> tuple[float, float] | None:
    """The smallest and the largest share in rows."""
    found = [row[f"{name}_{end}"] for row in rows for end in ("low", "high") if row[f"{name}_{end}"] is not None]
    return (min(found), max(found)) if found else None


def _span(low: float, high: float) -> str:
    shown = [percent(value).removesuffix(" %") for value in (low, high)]
    return f"{shown[0]} %" if shown[0] == shown[1] else f"{shown[0]} to {shown[1]} %"
