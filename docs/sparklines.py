"""A small picture beside every name of a table on the site: the curve that the code computes for it."""

import re
from collections.abc import Callable, Iterable

import numpy as np

from diffusers_lrlab.averaging.forms import EMAForm
from diffusers_lrlab.preview.plots import example_curves
from diffusers_lrlab.preview.timesteps import preview_timesteps
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

WIDTH, HEIGHT, POINTS = 84, 26, 60
UPDATES = 1000
# Averages whose defaults are made for longer runs.
TYPICAL = {"constant": "constant:decay=0.99", "half_life": "half_life:images=6400,images_per_update=64"}


def svg(curves: Iterable[np.ndarray], what: str) -> str:
    """A picture of values over equal steps, on one scale from 0; later curves are paler."""
    shown = [curve[np.linspace(0, len(curve) - 1, min(POINTS, len(curve))).astype(int)] for curve in curves]
    top, lines = max(float(values.max()) for values in shown), []
    for number, values in enumerate(shown):
        x, y = np.linspace(1, WIDTH - 1, len(values)), HEIGHT - 2 - (HEIGHT - 4) * values / top
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        lines.append(f'<polyline points="{points}" opacity="{1 - 0.3 * number:.1f}"/>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg class="spark" {box} role="img" aria-label="{what}">{"".join(lines)}</svg>'


def of_schedule(name: str) -> str:
    return svg([example_curves(name)[0].lr], f"{name}: learning rate over a run")


def of_momentum(name: str) -> str:
    beta1 = np.full(UPDATES, 0.95) if name == "constant" else example_curves(name)[0].beta1
    return "" if beta1 is None else svg([beta1], f"{name}: momentum over a run")


def of_sampler(name: str) -> str:
    """Densities at the start, in the middle and at the end of a run; none for what follows the losses."""
    if "feedback" in TIMESTEP_SAMPLERS[name].traits:
        return ""
    (shown,) = preview_timesteps([name], [], UPDATES, 200, "epsilon")
    return svg(shown.curves.values(), f"{name}: density over the timesteps, from little noise to much")


def of_weighting(name: str) -> str:
    if "feedback" in LOSS_WEIGHTINGS[name].traits:
        return ""
    (shown,) = preview_timesteps([], [name], None, 200, "epsilon")
    return svg(shown.curves.values(), f"{name}: weight over the timesteps, from little noise to much")


def of_average(name: str) -> str:
    """How much the weights of each update count in the average at the end of a run."""
    decays = EMAForm.of(TYPICAL.get(name, name)).decays(UPDATES)
    kept = np.append(np.cumprod(decays[:0:-1])[::-1], 1.0)
    return svg([(1 - decays) * kept], f"{name}: how much the weights of each update of a run count at its end")


OF_TABLES: dict[str, Callable[[str], str]] = {
    "schedules": of_schedule,
    "momentum": of_momentum,
    "timesteps": of_sampler,
    "weightings": of_weighting,
    "ema-forms": of_average,
}
_ROW = re.compile(r"^\| `([\w-]+)`[^|]*(?= \|)", re.MULTILINE)


def beside_names(markdown: str) -> str:
    """A page with a picture under the name that each row of these tables begins with."""
    for table, of in OF_TABLES.items():
        marked = re.search(f"<!-- {table}: .*?<!-- end of {table} -->", markdown, re.DOTALL)
        if marked:
            rows = _ROW.sub(lambda row, of=of: f"{row[0]}<br>{picture}" if (picture := of(row[1])) else row[0], marked[0])
            markdown = markdown.replace(marked[0], rows)
    return markdown
