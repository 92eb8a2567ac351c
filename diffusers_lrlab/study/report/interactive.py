"""
The interactive plots of a report: hover, arms that are shown or hidden in all plots at once, a logarithmic scale.

The figures are plotly's; arrays stay arrays, which plotly writes as short binary text. Traces carry the number of their arm
in their `meta`, by which the page's own buttons find them, and single seeds are marked there too.
"""

import html
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from .plots import spread
from .report_data import Course, Family, Look, Place, shortened, shown_arms, shown_datasets

_GRID, _INK = "#e3e3e3", "#222222"


class Panel(NamedTuple):
    """One plot of the page: what it shows, mostly a data set, and a figure without a title of its own."""

    title: str
    figure: go.Figure


def literal(text: str, most: int = 80) -> str:
    """A name that plotly shows as it is (it takes some HTML for markup)."""
    return html.escape(shortened(text, most), quote=False)


def _figure(traces: list[Any], x_axis: dict[str, Any], y_axis: dict[str, Any]) -> go.Figure:
    lines = {"gridcolor": _GRID, "zeroline": False, "linecolor": _INK, "automargin": True}
    axes = {"xaxis": {**lines, "showgrid": True, **x_axis}, "yaxis": {**lines, "exponentformat": "power", **y_axis}}
    look: dict[str, Any] = {"template": None, "showlegend": False, "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff"}
    look |= {"font": {"color": _INK, "size": 12, "family": "system-ui, sans-serif"}, "hovermode": "closest"}
    return go.Figure(traces, {**axes, **look, "margin": {"l": 8, "r": 8, "t": 28, "b": 8}})


def _trace(
    number: int, x: Any, y: Any, look: Look | None = None, arm: str = "", hover: str = "", **about: Any
) -> go.Scatter:
    """A line of the arm of this number, or of no arm (-1); `hover` is shown under the arm's name."""
    line = {"color": look.color} if look else {}
    if hover:
        about |= {"name": literal(arm), "hovertemplate": f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>"}
    about = {"mode": "lines", "hoverinfo": None if "hovertemplate" in about else "skip"} | about
    about |= {"line": line | about.get("line", {}), "meta": {"arm": number, **about.pop("meta", {})}}
    return go.Scatter(x=_short(x), y=y, **about)


def _short(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def course_panels(shown: dict[Place, Course], datasets: list[str], looks: dict[str, Look], family: Family) -> list[Panel]:
    """A plot of curves for each data set; one for all of them where they do not differ, as learning rates mostly do not."""
    datasets = shown_datasets(datasets, shown)
    title = None
    if len(datasets) > 1 and (common := _common(shown)):
        shown, title = {(arm, datasets[0]): course for arm, course in common.items()}, "all data sets"
        datasets = datasets[:1]
    panels = []
    for dataset in datasets:
        # Bands and single seeds first, so that no mean is hidden by another arm's.
        places = [
            (n, look, arm, shown[arm, dataset]) for n, (arm, look) in enumerate(looks.items()) if (arm, dataset) in shown
        ]
        varying = [(n, look, course) for n, look, _, course in places if course.seeds]
        traces = [_band(*place) for place in varying] + [_single_seeds(*place) for place in varying]
        traces += [_mean(*place) for place in places]
        last = max(course.updates[-1] for *_, course in places)
        axes = {"title": {"text": "update"}, "range": [0, 1.01 * last]}, {"title": {"text": family.axis}}
        panels.append(Panel(title or dataset, _figure(traces, *axes)))
    return panels


def _common(shown: dict[Place, Course]) -> dict[str, Course]:
    """The curve of each arm, if it is the same for all seeds and on all data sets, for every arm; else nothing."""
    common: dict[str, Course] = {}
    for (arm, _), course in shown.items():
        first = common.setdefault(arm, course)
        same_updates = len(course.mean) == len(first.mean) and np.allclose(course.updates, first.updates)
        if course.seeds or not same_updates or not np.allclose(course.mean, first.mean, rtol=1e-6, atol=0):
            return {}
    return common


def _band(number: int, look: Look, course: Course) -> go.Scatter:
    x = np.concatenate([course.updates, course.updates[::-1]])
    y = _short(np.concatenate([course.high, course.low[::-1]]))
    return _trace(number, x, y, fill="toself", fillcolor=look.color, opacity=0.15, line={"width": 0})


def _single_seeds(number: int, look: Look, course: Course) -> go.Scatter:
    """All single seeds of an arm as one trace with gaps, which draws much faster than one for each."""
    gap = [np.nan]
    x = np.concatenate([part for _ in course.seeds for part in (course.seed_updates, gap)])
    y = _short(np.concatenate([part for seed in course.seeds for part in (seed, gap)]))
    return _trace(number, x, y, look, line={"width": 0.6}, opacity=0.45, connectgaps=False, meta={"seeds": True})


def _mean(number: int, look: Look, arm: str, course: Course) -> go.Scatter:
    of = f"mean of {course.num_runs} runs" if course.num_runs > 1 else "1 run"
    line, hover = {"width": 2, "dash": look.plotly_line}, f"update %{{x:,.0f}}: %{{y:.4g}}<br>{of}"
    return _trace(number, course.updates, _short(course.mean), look, arm, hover, line=line)


def seed_panels(
    values: dict[Place, list[tuple[int, float]]], rows: list[dict[str, Any]], datasets: list[str], looks: dict[str, Look]
) -> list[Panel]:
    """Seeds as points over means with their 95 % intervals, a plot for each data set."""
    panels = []
    of_place = {(row["arm"], row["dataset"]): row for row in rows}
    arms = shown_arms(looks, values)
    for dataset in shown_datasets(datasets, values):
        traces: list[Any] = []
        for place, arm in enumerate(arms):
            if (arm, dataset) not in values:
                continue
            number, look, row = list(looks).index(arm), looks[arm], of_place[arm, dataset]
            traces.append(_points(number, look, place, arm, values[arm, dataset]))
            if row["mean"] is not None:
                traces.append(_interval(number, look, place, arm, row))
        ticks = {"tickvals": list(range(len(arms))), "ticktext": [literal(arm, 20) for arm in arms]}
        figure = _figure(traces, {**ticks, "range": [-0.6, len(arms) - 0.4], "showgrid": False}, {})
        floor = next((row["floor"] for row in rows if row["dataset"] == dataset and row.get("floor") is not None), None)
        if floor is not None:
            figure.add_trace(_floor(floor, len(arms)))
        panels.append(Panel(dataset, figure))
    return panels


def _floor(value: float, num_arms: int) -> go.Scatter:
    """What held-out points score, as a line that belongs to no arm."""
    line = {"color": "#767676", "width": 1.2, "dash": "dot"}
    x = np.linspace(-0.6, num_arms - 0.4, 9)
    return _trace(-1, x, [value] * 9, line=line, hovertemplate="held-out points: %{y:.4g}<extra></extra>")


def _points(number: int, look: Look, place: int, arm: str, found: list[tuple[int, float]]) -> go.Scatter:
    seeds, values = zip(*found, strict=True)
    marker = {"color": look.color, "size": 6, "opacity": 0.6, "symbol": look.plotly_marker}
    about: dict[str, Any] = {"mode": "markers", "marker": marker, "customdata": seeds}
    return _trace(number, place + spread(len(found)), values, arm=arm, hover="seed %{customdata}: %{y:.4g}", **about)


def _interval(number: int, look: Look, place: int, arm: str, row: dict[str, Any]) -> go.Scatter:
    mean, low, high = row["mean"], row["ci_low"], row["ci_high"]
    text = f"mean of {row['n']}: %{{y:.4g}}" + ("" if low is None else f"<br>95 % interval {low:.4g} to {high:.4g}")
    about: dict[str, Any] = {"line": {"width": 2}}
    if low is not None:
        bars = {"array": [None, high - mean, None], "arrayminus": [None, mean - low, None]}
        about["error_y"] = {**bars, "color": look.color, "thickness": 1.5, "width": 4}
    return _trace(number, [place - 0.33, place, place + 0.33], [mean] * 3, look, arm, text, **about)
