"""The width of the average with the best metric, of many that the snapshots of a run give."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..averaging.posthoc import swept_widths
from ..core.errors import LabError, did_you_mean, must_be
from ..core.plotting import BLUE, GREY, ORANGE, new_figure, plain_axes, save_figure
from ..evaluation.evaluate import metrics_of
from ..evaluation.registry import METRICS, better_of, metric_label
from ..hub.recorded_options import repeated_options
from ..training.config import TrainingConfig
from ..training.prepare import prepare_resolved, resolve_and_check
from ..training.results.base import results_of
from ..training.run_folder import RunFolder
from ..training.run_state import RunState
from ..training.saved_pipeline import SavedPipeline, Weights
from .averages import RunSnapshots

VALIDATION = "validation_loss"


@dataclass(frozen=True)
class Sweep:
    """A metric by width of the average."""

    metric: str
    widths: list[float]
    values: list[float]
    residuals: list[float]
    of_run: float  # of the average that the run saved

    @property
    def best(self) -> int:
        return int(np.argmax(self.values) if better_of(self.metric) == "larger" else np.argmin(self.values))

    @property
    def is_at_edge(self) -> bool:
        return self.best in (0, len(self.widths) - 1)

    def about(self) -> dict[str, Any]:
        return {"sweep": dataclasses.asdict(self)}


def sweep_widths(found: RunSnapshots, metric: str, num: int, show: Callable[[float, float], None]) -> Sweep:
    """
    Measures the average of `num` widths, evenly spaced by ratio from the smallest stored one to 0.25, and calls `show` with
    each width and its value.
    """
    measured = MeasuredRun(found.folder, metric)
    widths = swept_widths(found.widths, num)
    values, residuals = [], []
    for width in widths:
        combination = found.combination(width)
        residuals.append(combination.residual)
        values.append(measured.value(found.weights(combination.coefficients.tolist())))
        show(width, values[-1])
    of_run = measured.value(saved_weights(SavedPipeline.of(found.folder), measured.names))
    return _finite(Sweep(metric, widths, values, residuals, of_run))


def _finite(sweep: Sweep) -> Sweep:
    """The sweep; a `LabError` if a value is not finite."""
    if not np.isfinite(sweep.values).all():
        label = metric_label(sweep.metric)
        raise LabError(f"--metric {sweep.metric}: {label} is not finite for all widths. Hint: choose another.")
    return sweep


class MeasuredRun:
    """A run with its data and its model, whose average is replaced and measured."""

    def __init__(self, folder: Path, metric: str):
        self.metric = metric
        options = repeated_options(folder) | {"preflight": False}
        with tempfile.TemporaryDirectory() as temporary:  # nothing is written there
            config = resolve_and_check(TrainingConfig(**options, output_dir=temporary))
            plan, data, accelerator = prepare_resolved(config, RunFolder(folder).newest_checkpoint())
        self.run = RunState(plan, data, accelerator.device)
        self.run.model.to(accelerator.device)
        assert self.run.average is not None, "there are snapshots"
        self.average = self.run.average
        self.names = [name for name, _ in self.run.model.named_parameters()]
        if reason := self._absence():
            near = "" if metric in METRICS else did_you_mean(metric, METRICS)
            hint = near.strip() or "validation_loss needs only held-out data"
            raise must_be("--metric", metric, "measurable in this run", hint, got=reason)

    def _absence(self) -> str | None:
        """Why the metric cannot be measured in this run; `None` if it can."""
        run = self.run
        if self.metric == VALIDATION:
            return None if run.validation is not None else "a run without held-out data"
        if self.metric not in METRICS:
            return "no metric of that name"
        if not metrics_of(run, True, {self.metric}):
            form = METRICS[self.metric].form
            return "one that is only logged" if form in (None, run.kind.form) else f"one of {form}"
        num = results_of(run.kind).num_samples(run.config, len(run.data.held_out), run.data.num_images)
        return None if num or "samples" not in METRICS[self.metric].needs else "a run that measures no samples"

    def value(self, weights: Weights) -> float:
        """The metric of the model with these weights, by parameter."""
        own = self.average.shadow_params
        torch._foreach_copy_(own, [weights[name].to(own[0].device) for name in self.names])
        if self.metric == VALIDATION:
            return float(self.run.validation_losses()["validation_loss_ema"].mean())
        shown_by = results_of(self.run.kind)
        figures = shown_by.evaluate(self.run, shown_by.samples_to_evaluate(self.run), {self.metric})
        return float(figures.get(self.metric, np.nan))


def saved_weights(pipeline: SavedPipeline, names: list[str], folder: Path | None = None) -> Weights:
    """The weights that a run saved, by parameter, or those in another folder with the same files, such as a checkpoint."""
    found: Weights = {}
    for path in pipeline.weight_files(folder):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).float() for name in file.keys()}  # it is no mapping
    return {name: found[name] for name in names}


def plot_sweep(sweep: Sweep, path: Path) -> None:
    """The metric by width, with the best one and the value of the average that the run saved."""
    label = "loss on held-out data" if sweep.metric == VALIDATION else metric_label(sweep.metric)
    figure = new_figure(6, 3.6, dpi=150)
    axes = figure.subplots()
    plain_axes(axes)
    axes.plot(sweep.widths, sweep.values, "o-", color=BLUE, markersize=4, label="from snapshots")
    axes.plot(sweep.widths[sweep.best], sweep.values[sweep.best], "o", color=ORANGE, markersize=8, label="best")
    axes.axhline(sweep.of_run, color=GREY, linewidth=1, label="as the run saved it")
    axes.set(xscale="log", xlabel="sigma_rel, the width of the average as a share of the run", ylabel=label)
    axes.set_xticks(ticks := [width for width in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25) if width >= 0.9 * sweep.widths[0]])
    axes.set_xticklabels([f"{width:g}" for width in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    save_figure(figure, path)
