"""The record of a run: its curves, and what is measured when it is trained, for members of stacks and single runs alike."""

import math
import time
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.errors import Diverged
from ...evaluation.metrics import METRICS
from ...training.pipeline import draw_samples
from ...training.results import results_of
from ...training.run_state import RunState
from ..spec.spec import RunSpec
from .context import StudyContext
from .progress import MEASURED

DRAWN = 0.5  # share of sampling in the progress bar of measuring a run
_MOST_POINTS = 200
Drawn = dict[str, np.ndarray]  # samples by purpose: "compared" (metrics) or "recorded" (kept only)


class Curves:
    """Rows of the log of a run, as columns; losses are averaged to at most `_MOST_POINTS` points."""

    def __init__(self, num_updates: int):
        self.num_updates = num_updates
        self._losses: list[tuple[int, float, float, float | None]] = []
        self._quality: list[dict[str, float]] = []

    def add_loss(self, update: int, loss: float, lr: float, beta1: float | None = None) -> None:
        """Adds the mean training loss since the last row, and learning rate and momentum of its last `update`."""
        self._losses.append((update, loss, lr, beta1))

    def add_quality(self, update: int, losses: dict[str, float]) -> None:
        self._quality.append({"update": update, **losses})

    @property
    def last_quality(self) -> dict[str, float]:
        return {key: value for key, value in (self._quality or [{}])[-1].items() if key != "update"}

    def to_dict(self) -> dict[str, dict[str, list[Any]]]:
        """
        Data for the record: losses as means over equal parts of the run, and quality at some points; at most 200 points.
        """
        parts: dict[int, list[tuple[int, float, float, float | None]]] = {}
        for row in self._losses:
            parts.setdefault(row[0] * _MOST_POINTS // max(self.num_updates, 1), []).append(row)
        losses = [(rows[-1][0], float(np.mean([row[1] for row in rows])), *rows[-1][2:]) for rows in parts.values()]
        finite = [row for row in losses if math.isfinite(row[1])]
        has_momentum = bool(finite) and all(row[3] is not None for row in finite)
        columns = ("update", "loss", "lr", "beta1") if has_momentum else ("update", "loss", "lr")
        loss = {name: [row[index] for row in finite] for index, name in enumerate(columns)}
        if not self._quality:
            return {"loss": loss, "quality": {}}
        # Some schedules validate after every update.
        kept = np.unique(np.linspace(0, len(self._quality) - 1, _MOST_POINTS).astype(int))
        quality = {name: [self._quality[index][name] for index in kept] for name in self._quality[0]}
        return {"loss": loss, "quality": quality}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [list(row) for row in self._losses], "quality": self._quality}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = [tuple(row) for row in state["losses"]]
        self._quality = list(state["quality"])


def record_run(
    study: StudyContext,
    spec: RunSpec,
    run: RunState,
    curves: Curves,
    error: str | None,
    executor: dict[str, Any],
    started: str,
    drawn: Drawn | None = None,
) -> None:
    """
    Measures a run and keeps its record.

    `error` is the reason why training ended early, `executor` the way in which the run was computed. Samples that are not
    in `drawn` are generated here.
    """
    sections, error = finish(run, spec, curves, error, drawn)
    study.progress.advance(1 - (DRAWN if drawn else 0), MEASURED)
    about = {name: getattr(spec, name) for name in ("id", "arm", "dataset", "seed", "stage")}
    about |= {
        "learning_rate": spec.config.learning_rate,
        "status": "finished" if error is None else "diverged",
        "error": error,
        "executor": executor,
        "started": started,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    study.keep(spec, {"run": about, **sections, "config": spec.fields, "meta": study.meta})


def finish(
    run: RunState, spec: RunSpec, curves: Curves, error: str | None, drawn: Drawn | None = None
) -> tuple[dict[str, Any], str | None]:
    """The sections of a record, and why the run diverged if it did, in training (`error`) or in sampling."""
    if error is None:
        try:
            return measure(run, spec, curves, drawn), None
        except Diverged as reason:
            error = str(reason)
    return {"train": {**_training_of(run), "results": {}}, "curves": curves.to_dict()}, error


def measure(run: RunState, spec: RunSpec, curves: Curves, drawn: Drawn | None = None) -> dict[str, Any]:
    """Sections of the record of a finished run; raises `Diverged` if samples are not finite."""
    drawn, kind_results = draw(run, spec, drawn), results_of(run.kind)
    if not all(np.isfinite(samples).all() for samples in drawn.values()):
        raise Diverged("The samples at the end are not finite.")
    started = time.perf_counter()
    results = kind_results.evaluate(run, drawn.get("compared"), spec.metrics)
    results |= {name: value for name, value in curves.last_quality.items() if name in spec.metrics}
    sections: dict[str, Any] = {"curves": curves.to_dict()}
    if spec.stage == "compare":
        samples = drawn["compared" if "compared" in drawn else "recorded"]
        sections["samples"] = kind_results.recorded(samples[: kind_results.num_recorded])
    run.evaluation_seconds += time.perf_counter() - started
    return {"train": {**_training_of(run), "results": results}, **sections}


class Drawing(NamedTuple):
    """Samples to generate: their number, the number of steps, and the stream of random numbers."""

    num: int
    num_steps: int
    stream: tuple[Any, ...]


def drawings_of(run: RunState, spec: RunSpec) -> dict[str, Drawing]:
    """The samples to generate with the averaged weights of a run, see `Drawn`."""
    kind_results, config, num = results_of(run.kind), run.config, 0
    drawings: dict[str, Drawing] = {}
    if any("samples" in METRICS[name].needs for name in spec.metrics):
        num = config.distance_samples or 0
    if num:
        drawings["compared"] = Drawing(num, config.num_inference_steps, (config.seed, kind_results.stream, 0))
    elif spec.stage == "compare":
        stream = config.seed, "distances", 0
        drawings["recorded"] = Drawing(kind_results.num_recorded, config.num_inference_steps, stream)
    return drawings


def draw(run: RunState, spec: RunSpec, drawn: Drawn | None = None) -> Drawn:
    """The samples of a run; those that are not in `drawn` are generated with its own pipeline."""
    drawn = dict(drawn or {})
    for name, drawing in drawings_of(run, spec).items():
        if name in drawn:
            continue
        started = time.perf_counter()
        with run.averaged_weights(), torch.no_grad():
            drawn[name] = draw_samples(run, drawing.num, drawing.stream[1], show_progress=name == "compared")
        run.sampling_seconds = time.perf_counter() - started
    return drawn


def _training_of(run: RunState) -> dict[str, Any]:
    began = run.objective.sampler.began()
    return {
        "data_fingerprint": run.data.fingerprint,
        "num_updates": run.plan.num_updates,
        "updates_done": run.update,
        "model": run.plan.model_config,
        "num_parameters": run.plan.num_parameters,
        **({} if run.plan.start is None else {"started_from": run.plan.start.facts}),
        "global_batch": run.plan.layout.global_batch,
        **({} if began is None else {"timestep_density_began": began or None}),
        "largest_lr_deviation": run.audit.largest_lr_deviation,
        "training_seconds": run.training_seconds,
        "sampling_seconds": run.sampling_seconds,
        "evaluation_seconds": run.evaluation_seconds,
    }
