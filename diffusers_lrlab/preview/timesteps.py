"""Previews of timestep samplers and loss weightings, without a model."""

import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.plotting import BLUE, GREY, ORANGE, new_figure, save_figure
from ..core.registry import Registry
from ..core.spec import choose, format_spec
from ..core.words import aligned
from ..timesteps.noise_levels import NoiseLevels, noise_levels
from ..timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

_MOMENTS = ((0.0, "start", GREY), (0.5, "middle", BLUE), (1.0, "end", ORANGE))


@dataclass(frozen=True)
class TimestepPreview:
    """The density or weight of each timestep."""

    label: str  # its spec string
    what: str  # "density / uniform" or "weight"
    curves: dict[int, np.ndarray]  # by update, float64 of shape (T,); only update 0 if they are constant


def preview_timesteps(
    samplers: list[str],
    weightings: list[str],
    num_updates: int | None,
    num_train_timesteps: int,
    prediction_type: str,
    levels: NoiseLevels | None = None,
) -> list[TimestepPreview]:
    """
    Previews of samplers and weightings (spec strings) under `levels`, or the linear noise schedule of `DDPMScheduler()`.

    `"all"` stands for those that do not follow the losses. Curricula need `num_updates`.
    """
    from ..timesteps.sampling import TimestepSampler
    from ..timesteps.weighting import LossWeighting

    levels, previews = levels or noise_levels(None, num_train_timesteps), []
    for name, kwargs, label in _expanded(samplers, TIMESTEP_SAMPLERS):
        sampler = TimestepSampler(name, kwargs, levels, num_updates)
        updates = sorted({round(share * (num_updates or 0)) for share, _, _ in _MOMENTS})
        curves = {update: num_train_timesteps * sampler.probabilities(update).numpy() for update in updates}
        if all(np.array_equal(curve, curves[0]) for curve in curves.values()):
            curves = {0: curves[0]}
        previews.append(TimestepPreview(label, "density / uniform", curves))
    for name, kwargs, label in _expanded(weightings, LOSS_WEIGHTINGS):
        table = LossWeighting(name, kwargs, levels, prediction_type).table.double().numpy()
        previews.append(TimestepPreview(label, "weight", {0: table}))
    return previews


def _expanded(specs: list[str], registry: Registry) -> list[tuple[str, dict[str, Any], str]]:
    """Name, resolved parameters and label of each spec string."""
    found = []
    for spec in specs:
        names = [name for name, entry in registry.items() if "feedback" not in entry.traits] if spec == "all" else [spec]
        for each in names:
            choice = choose(each, None, registry)
            if "feedback" in choice.entry.traits:
                raise LabError(
                    f"{choice.name!r} follows the losses of a run: there is nothing to show before it. Leave it out."
                )
            found.append((choice.name, choice.kwargs, format_spec(choice.name, choice.given)))
    return found


def describe_timesteps(previews: list[TimestepPreview], objective: str) -> str:
    """A table of values at some timesteps of an objective, from low to high noise."""
    num = len(next(iter(previews[0].curves.values())))
    timesteps = sorted({min(round(share * num), num - 1) for share in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)})
    rows = [[f"timestep of {objective}", *(str(timestep) for timestep in timesteps)]]
    for preview in previews:
        for update, curve in preview.curves.items():
            moment = f" at update {update}" if len(preview.curves) > 1 else ""
            rows.append([f"{preview.label}{moment}: {preview.what}", *(f"{curve[timestep]:.3g}" for timestep in timesteps)])
    return aligned(rows)


def as_json(previews: list[TimestepPreview]) -> str:
    shown = []
    for preview in previews:
        updates, values = list(preview.curves), [curve.tolist() for curve in preview.curves.values()]
        shown.append({"name": preview.label, "what": preview.what, "updates": updates, "values": values})
    return json.dumps(shown, allow_nan=False)


def plot_timestep_previews(previews: list[TimestepPreview], objective: str, path: Path) -> None:
    """A panel for each sampler and weighting; curves that change are shown at start, middle and end of the run."""
    columns = min(4, len(previews))
    rows = math.ceil(len(previews) / columns)
    figure = new_figure(max(3.6, 1.8 * columns), 1.6 * rows + 0.6, dpi=150)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, preview in zip(panels, previews, strict=False):
        values = np.concatenate(list(preview.curves.values()))
        moments = _MOMENTS[:1] if len(preview.curves) == 1 else _MOMENTS
        for (_, label, color), curve in zip(moments, preview.curves.values(), strict=False):
            axes.plot(curve, color=BLUE if len(preview.curves) == 1 else color, linewidth=1.4, label=label)
        if preview.what == "weight" and values.max() > 20 * max(values.min(), 1e-300):
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, max(1.15, 1.08 * values.max()))
        axes.axhline(1, color=GREY, linewidth=0.7, linestyle=":")
        axes.set_title(textwrap.fill(preview.label, 26), fontsize=8)
        axes.tick_params(labelsize=8)
        axes.locator_params(axis="x", nbins=3)
        axes.spines[["top", "right"]].set_visible(False)
    for index, axes in enumerate(panels):
        if index >= len(previews):
            axes.remove()
        elif index % columns == 0 or previews[index].what != previews[index - 1].what:
            axes.set_ylabel(previews[index].what, fontsize=8)
    figure.supxlabel(f"timestep (noise) of {objective}", fontsize=8)
    if moving := [axes for axes, preview in zip(panels, previews, strict=False) if len(preview.curves) > 1]:
        lines, labels = moving[0].get_legend_handles_labels()
        labels = [f"{label} of the run" for label in labels]
        figure.legend(lines, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=8)
    save_figure(figure, path)
