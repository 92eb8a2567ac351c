"""The plots of a report, each with a text that describes it."""

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from . import plots, sample_grid, tables
from .contents import ReportContents
from .curves import CURVE_KINDS

DIFFERENCES, SAMPLES = "differences.png", "samples.png"


class Plot(NamedTuple):
    """A plot of a report, not made yet."""

    file: str
    title: str
    alt: str  # text for screen readers
    make: Callable[..., Any]  # a figure, `width` inches wide if that is given


def plots_of(contents: ReportContents, kept: Collection[str] = ()) -> list[Plot]:
    """All plots for which there are data, or whose files are in `kept`."""
    found, panels, baseline = [], "a panel for each data set", contents.study["baseline"]
    arms = [arm for arm in contents.study["arms"] if arm != baseline]
    for metric in contents.metrics[:1]:
        rows = [row for row in tables.rows_of(contents.summary, metric) if row["arm"] != baseline]
        if any(row["diff"] is not None for row in rows):
            title = f"{contents.labels[metric]}: differences from {baseline}"
            alt = f"{title} with their 95 % intervals, {panels}. {' '.join(contents.conclusions()[0].sentences)}"
            make = partial(plots.plot_differences, rows, contents.datasets, arms, baseline)
            found.append(Plot(DIFFERENCES, title, alt, make))
    for kind in CURVE_KINDS:
        file = f"{kind.name}.png"
        if kind not in contents.curve_kinds and file not in kept:
            continue
        alt = f"{kind.title} of each arm over the updates, as means over seeds, {panels}."
        make = partial(plots.plot_curves, contents.curves[kind.name], contents.datasets, contents.styles, kind)
        found.append(Plot(file, kind.title, alt, make))
    for metric, label in contents.labels.items():
        values, file = contents.values.get(metric), file_of("seeds", metric)
        if values or file in kept:
            alt = f"{label}: every seed as a point over its arm, with the mean and its 95 % interval, {panels}."
            rows = tables.rows_of(contents.summary, metric)
            make = partial(plots.plot_seeds, values or {}, rows, contents.datasets, contents.styles, label)
            found.append(Plot(file, f"{label}: every seed", alt, make))
        ranks = contents.summary["ranks"].get(metric)
        if ranks and len(ranks["mean_ranks"]) > 1 < len(ranks["datasets"]):  # one data set has an order, no mean ranks
            title = f"{label}: mean ranks of the arms over data sets"
            alt = f"{title}. {', '.join(f'{arm}: {rank:.3g}' for arm, rank in ranks['mean_ranks'].items())}."
            found.append(Plot(file_of("ranks", metric), title, alt, partial(plots.plot_ranks, ranks, contents.styles)))
    chosen = sample_grid.samples_to_show(contents.results)
    if chosen or SAMPLES in kept:
        alt = "Samples of the lowest seed of each arm: a row for each data set, a column for each arm."
        make = partial(sample_grid.plot_sample_grid, chosen, contents.datasets, contents.styles)
        found.append(Plot(SAMPLES, "Samples of the lowest seed", alt, make))
    return found


def file_of(what: str, metric: str) -> str:
    """The file of one of the plots that each metric has."""
    return f"{what}_{file_name(metric)}.png"


def file_name(name: str) -> str:
    """A name without characters that file systems or LaTeX may reject."""
    return re.sub(r"[^\w-]", "_", name)
