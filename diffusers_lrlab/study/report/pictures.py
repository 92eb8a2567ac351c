"""Which pictures a report has, with a text for each that says what it shows."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from . import plots, sample_grid, tables
from .report_contents import ReportContents

DIFFERENCES, SAMPLES = "differences.png", "samples.png"


class Picture(NamedTuple):
    """One picture of a report, and how it is drawn."""

    file: str
    title: str
    alt: str  # for those who do not see it
    draw: Callable[..., Any]  # a figure, `width` inches wide if that is given


def pictures_of(contents: ReportContents) -> list[Picture]:
    """All for which there are data; nothing is drawn yet."""
    pictures, panels = [], "a panel for each data set"
    arms = [arm for arm in contents.study["arms"] if arm != contents.study["baseline"]]
    for metric in contents.metrics[:1]:
        rows = [row for row in tables.rows_of(contents.summary, metric) if row["arm"] != contents.study["baseline"]]
        if any(row["diff"] is not None for row in rows):
            title = f"{contents.labels[metric]}: differences from {contents.study['baseline']}"
            alt = f"{title} with their 95 % intervals, {panels}. {' '.join(contents.questions()[0][2])}"
            pictures.append(Picture(DIFFERENCES, title, alt, partial(
                plots.plot_differences, rows, contents.datasets, arms, contents.study["baseline"])))  # fmt: skip
    for family in contents.families:
        alt = f"{family.title} of each arm over the updates, as means over seeds, {panels}."
        pictures.append(Picture(f"{family.name}.png", family.title, alt, partial(
            plots.plot_courses, contents.courses[family.name], contents.datasets, contents.looks, family)))  # fmt: skip
    for metric in contents.metrics:
        label = contents.labels[metric]
        if contents.values[metric]:
            alt = f"{label}: every seed as a point over its arm, with the mean and its 95 % interval, {panels}."
            rows = tables.rows_of(contents.summary, metric)
            pictures.append(Picture(picture_of("seeds", metric), f"{label}: every seed", alt, partial(
                plots.plot_seeds, contents.values[metric], rows, contents.datasets, contents.looks, label)))  # fmt: skip
        if (ranks := contents.summary["ranks"].get(metric)) and len(ranks["mean_ranks"]) > 1:
            title = f"{label}: mean ranks of the arms over data sets"
            alt = f"{title}. {', '.join(f'{arm}: {rank:.3g}' for arm, rank in ranks['mean_ranks'].items())}."
            draw = partial(plots.plot_ranks, ranks, contents.looks)
            pictures.append(Picture(picture_of("ranks", metric), title, alt, draw))
    if chosen := sample_grid.samples_to_show(contents.results):
        alt = "What the lowest seed of each arm generates: a row for each data set, a column for each arm."
        draw = partial(sample_grid.plot_sample_grid, chosen, contents.datasets, contents.looks)
        pictures.append(Picture(SAMPLES, "Samples of the lowest seed", alt, draw))
    return pictures


def picture_of(what: str, metric: str) -> str:
    """The file of one of the pictures that each metric has."""
    return f"{what}_{file_name(metric)}.png"


def file_name(name: str) -> str:
    """A name without what file systems or LaTeX may not take."""
    return re.sub(r"[^\w-]", "_", name)
