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

_MOST_POINTS = 200


class Curves:
    """Rows of the log of a run, as columns; losses are averaged to at most `_MOST_POINTS` points."""

    def __init__(self, num_updates: int):
        self.num_updates = num_updates
        self._losses: list[tuple[int, float, float, float | None]] = []
        self._quality: list[dict[str, float]] = []

    @classmethod
    def of_log(cls, rows: list[dict[str, Any]], num_updates: int) -> "Curves":
        """Those of the rows that a trainer has logged."""
        curves = cls(num_updates)
        for row in rows:
            if "loss" in row:
                curves.add_loss(row["update"], row["loss"], row["lr"], row.get("beta1"))
            else:
                curves.add_quality(row["update"], {key: value for key, value in row.items() if key != "update"})
        return curves

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
    samples: np.ndarray | None = None,
) -> None:
    """
    Measures a run and keeps its record.

    `error` is the reason why training ended early, `executor` the way in which the run was computed. The `samples` of
    [`drawing_of`] are generated here if they are not given.
    """
    sections = {"train": {**_training_of(run), "results": {}}, "curves": curves.to_dict()}
    if error is None:
        try:
            sections = measure(run, spec, curves, samples)
        except Diverged as reason:
            error = str(reason)
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


def measure(run: RunState, spec: RunSpec, curves: Curves, samples: np.ndarray | None = None) -> dict[str, Any]:
    """Sections of the record of a finished run; raises `Diverged` if samples are not finite."""
    drawing, kind_results = drawing_of(run, spec), results_of(run.kind)
    if drawing is not None:
        samples = draw(run, drawing) if samples is None else samples
        if not np.isfinite(samples).all():
            raise Diverged("The samples at the end are not finite.")
    started = time.perf_counter()
    results = kind_results.evaluate(run, samples if drawing is not None and drawing.is_compared else None, spec.metrics)
    results |= {name: value for name, value in curves.last_quality.items() if name in spec.metrics}
    sections: dict[str, Any] = {"curves": curves.to_dict()}
    if spec.stage == "compare" and samples is not None:
        sections["samples"] = kind_results.recorded(samples[: kind_results.num_recorded])
    run.evaluation_seconds += time.perf_counter() - started
    return {"train": {**_training_of(run), "results": results}, **sections}


class Drawing(NamedTuple):
    """Samples to generate: number, number of steps, stream of random numbers, and whether metrics compare them with data."""

    num: int
    num_steps: int
    stream: tuple[Any, ...]
    is_compared: bool


def drawing_of(run: RunState, spec: RunSpec) -> Drawing | None:
    """The samples to generate with the averaged weights of a run: for its metrics, or else some for its record."""
    kind_results, config = results_of(run.kind), run.config
    if any("samples" in METRICS[name].needs for name in spec.metrics):
        num = config.distance_samples or 0
        if num:
            return Drawing(num, config.num_inference_steps, (config.seed, kind_results.stream, 0), True)
    if spec.stage != "compare":
        return None
    return Drawing(kind_results.num_recorded, config.num_inference_steps, (config.seed, "distances", 0), False)


def draw(run: RunState, drawing: Drawing) -> np.ndarray:
    """Samples of a run by its own pipeline."""
    started = time.perf_counter()
    with run.averaged_weights(), torch.no_grad():
        samples = draw_samples(run, drawing.num, drawing.stream[1], show_progress=drawing.is_compared)
    run.sampling_seconds = time.perf_counter() - started
    return samples


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
