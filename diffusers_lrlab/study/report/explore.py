"""Data for the script of the page: the study as plain values, each as short as a chart needs."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...evaluation.metrics import better_of
from ..analysis.verdicts import word_of
from . import plots, tables
from .contents import ReportContents
from .curves import CurveKind, compared, spans_decades
from .plot_list import DIFFERENCES, file_of

MOST_BYTES_OF_SAMPLES = 300_000
"""Limit on the samples in a page; those of the lowest seeds come first."""
_MOST_POINTS_OF_A_RUN = 300
_NOT_OF_A_RUN = ("seed", "output_dir")  # said elsewhere, or a path


def page_data(contents: ReportContents, files: Iterable[str]) -> dict[str, Any]:
    """The study for `explore.js`; charts are those of the plots in `files`."""
    files = set(files)
    charts = [_differences(contents)] if DIFFERENCES in files else []
    charts += [_seeds(contents, metric) for metric in contents.metrics if file_of("seeds", metric) in files]
    charts += [_curves(contents, kind) for kind in contents.curve_kinds]
    return {
        # A list: JavaScript would put names that are whole numbers first.
        "arms": [{"name": arm, "color": style.color, "dashes": style.dashes} for arm, style in contents.styles.items()],
        "datasets": contents.datasets,
        "seeds": sorted({run.seed for run in compared(contents.results)}),
        "labels": contents.labels,
        "runs": _runs(contents),
        "charts": charts,
    }


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _differences(contents: ReportContents) -> dict[str, Any]:
    metric, baseline = contents.metrics[0], contents.study["baseline"]
    rows = [
        {
            "arm": row["arm"], "dataset": row["dataset"], "diff": row["diff"], "low": row["diff_low"],
            "high": row["diff_high"], "p": row["p_adjusted"], "word": word_of(row), "color": plots.color_of(row),
        }
        for row in tables.rows_of(contents.summary, metric) if row["arm"] != baseline
    ]  # fmt: skip
    about = {"what": "differences", "file": DIFFERENCES, "label": contents.labels[metric]}
    return {**about, "better": better_of(metric), "rows": rows}


def _seeds(contents: ReportContents, metric: str) -> dict[str, Any]:
    values = contents.values[metric]
    rows = [
        {
            "arm": row["arm"], "dataset": row["dataset"], "mean": row["mean"], "low": row["ci_low"], "high": row["ci_high"],
            "floor": row.get("floor"),
        }
        for row in tables.rows_of(contents.summary, metric) if (row["arm"], row["dataset"]) in values
    ]  # fmt: skip
    is_log = spans_decades({cell: np.array([value for _, value in found]) for cell, found in values.items()})
    about = {"what": "seeds", "file": file_of("seeds", metric), "label": contents.labels[metric]}
    return {**about, "metric": metric, "log": is_log, "rows": rows}


def _curves(contents: ReportContents, kind: CurveKind) -> dict[str, Any]:
    shown = contents.curves[kind.name]
    lines = [
        {
            "arm": arm, "dataset": dataset, "updates": curve.updates.tolist(), "mean": _short(curve.mean),
            "low": _short(curve.low), "high": _short(curve.high), "seed_updates": curve.seed_updates.tolist(),
            "seeds": {seed: _short(values) for seed, values in zip(curve.seed_names, curve.seeds, strict=True)},
        }
        for (arm, dataset), curve in shown.items()
    ]  # fmt: skip
    is_log = kind.is_loss and all(curve.mean.min() > 0 for curve in shown.values())
    return {"what": "curves", "file": f"{kind.name}.png", "label": kind.axis, "log": is_log, "lines": lines}


def _runs(contents: ReportContents) -> list[dict[str, Any]]:
    runs, left = compared(contents.results), MOST_BYTES_OF_SAMPLES
    common = {key for key, _ in contents.common_config()}
    found = []
    for run in runs:
        config = {key: value for key, value in run.config.items() if _is_own(key, value, common)}
        about = {"id": run.id, "arm": run.arm, "dataset": run.dataset, "seed": run.seed, "rate": run.learning_rate}
        values = {name: value for name in contents.metrics if (value := run.results.get(name)) is not None}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        samples = _samples(run.samples)
        left -= len(json.dumps(samples))
        found.append({**about, "values": finite, "config": config, **(samples if left > 0 else {})})
    return found


def _is_own(key: str, value: Any, common: set[str]) -> bool:
    """Whether an option is of interest in one run: others have it otherwise, and it is no path."""
    return value is not None and key not in common and key not in _NOT_OF_A_RUN and not str(value).startswith("/")


def _samples(samples: Mapping[str, Any]) -> dict[str, Any]:
    if points := samples.get("points"):
        step = max(1, len(points) // _MOST_POINTS_OF_A_RUN)
        return {"points": [_short(point) for point in points[::step]]}
    return {"png": samples["png"]} if samples.get("png") else {}
