"""Horizons in a report: what each length reaches, and what all of them cost."""

from typing import Any

import pandas as pd

from ...evaluation.metrics import metric_label
from ..analysis.figures import NONE
from .curves import Style
from .formats import Table, plus_minus
from .plots import add_legend, axis_label, panels_for, plain


def horizon_tables(summary: dict[str, Any]) -> list[Table]:
    """The values at each length and the price of all lengths; none for a study without horizons."""
    rows, prices = summary.get("horizons") or [], summary.get("prices") or []
    if not rows:
        return []
    metrics = [name for name in summary["study"]["metrics"] if name in rows[0]]
    cells = [
        {
            "data set": row["dataset"], "horizon": f"{row['horizon']:,}", "arm": row["arm"], "runs": f"{row['runs']}",
            "left its trunk at": NONE if row["branch_at"] is None else f"{row['branch_at']:,}",
            "updates": f"{row['updates']:,.0f}",
            **{metric_label(name): plus_minus(row[name], row[f"{name}_std"]) for name in metrics},
        }
        for row in rows
    ]  # fmt: skip
    note = (
        "Mean ± standard deviation over seeds. Updates: those that a run of this length added to what was computed already; "
        "a branch adds its cool-down to its trunk, the longest run of its arm."
    )
    priced = [
        {
            "data set": row["dataset"], "arm": row["arm"], "updates of all horizons": f"{row['updates']:,.0f}",
            "as separate runs": f"{row['separate']:,.0f}", "for tuning": f"{row['tuning']:,.0f}",
        }
        for row in prices
    ]  # fmt: skip
    price = (
        "Updates for one seed, as they were computed, and as they would be if every horizon were a separate run. For "
        "tuning: updates of all runs that chose learning rates; a trunk has one rate, that of its longest horizon."
    )
    return [
        Table("horizons", "Horizons", pd.DataFrame(cells), note, 3),
        Table("price", "The cost of all horizons", pd.DataFrame(priced), price, 2),
    ]


def plot_horizons(
    rows: list[dict[str, Any]],
    prices: list[dict[str, Any]],
    metric: str,
    styles: dict[str, Style],
    width: float | None = None,
) -> Any:
    """The final value by the length of the run, with a bar of one standard deviation, on a logarithmic axis of lengths."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, panels = panels_for(datasets, 2.6, width)
    handles = {}
    for axes, dataset in zip(panels, datasets, strict=True):
        for arm, style in styles.items():
            own = [row for row in rows if (row["arm"], row["dataset"]) == (arm, dataset) and row[metric] is not None]
            own.sort(key=lambda row: row["horizon"])
            if not own:
                continue
            price = next(row["updates"] for row in prices if (row["arm"], row["dataset"]) == (arm, dataset))
            (handles[arm],) = axes.plot(
                [row["horizon"] for row in own], [row[metric] for row in own], style.line, color=style.color,
                marker=style.marker, markersize=4, label=f"{plain(arm)}: {price:,.0f} updates for all",
            )  # fmt: skip
            for row in own:
                spread = row[f"{metric}_std"] or 0.0
                ends = [row[metric] - spread, row[metric] + spread]
                axes.plot([row["horizon"]] * 2, ends, color=style.color, linewidth=1, alpha=0.6)
        axes.set_xscale("log", base=2)
        lengths = sorted({row["horizon"] for row in rows})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("length of the run, updates", fontsize=8)
    panels[0].set_ylabel(axis_label(metric_label(metric)), fontsize=8)
    add_legend(figure, [*handles.values()])
    return figure
