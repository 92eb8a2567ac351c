"""From a trained run to its record: the same for a member of a stack and for a run of its own."""

import time
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler

from ...core.errors import Diverged
from ...core.streams import stream_generator
from ...evaluation.metrics import METRICS
from ...training.base_run import BaseRun
from ...training.results.base import results_of
from ...training.samples import draw_samples
from ...training.trackers import scalars_of, start_trackers
from ..spec.spec import RunSpec
from .context import StudyContext
from .curves import Curves

_FIXED_SAMPLES, _FIXED_STEPS = 500, 50


def record_run(
    study: StudyContext,
    spec: RunSpec,
    run: BaseRun,
    curves: Curves,
    error: str | None,
    executor: dict[str, Any],
    started: str,
) -> None:
    """Measures a run and writes its record. `error` says why training ended early, `executor` how the run was computed."""
    sections, error = finish(run, spec, curves, error)
    weights = None
    if error is None and spec.stage == "compare" and run.kind.is_compared_between_runs:
        with run.averaged_weights():
            tensors = {name: value.detach().cpu().clone() for name, value in run.bare_model.state_dict().items()}
        weights = study.folder.write_weights(spec.id, tensors)
    about = {name: getattr(spec, name) for name in ("id", "arm", "dataset", "seed", "stage")}
    about |= {
        "learning_rate": spec.config.learning_rate,
        "status": "finished" if error is None else "diverged",
        "error": error,
        "executor": executor,
        "started": started,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    study.folder.write({"run": about, **sections, "weights": weights, "config": spec.fields, "meta": study.meta})
    _show_trackers(study, spec, sections)
    study.progress.finished(spec)


def _show_trackers(study: StudyContext, spec: RunSpec, sections: dict[str, Any]) -> None:
    """Shows a run that is done to the trackers of `logger`, in the group of its study: stacked runs end side by side."""
    about = {name: getattr(spec, name) for name in ("arm", "dataset", "seed", "stage")}
    folder = study.folder.path.resolve()
    trackers = start_trackers(spec.config, folder / "logs" / spec.id, spec.id, folder.name, **about)
    run, rows = sections["train"], dict[int, dict[str, float]]()
    for columns in sections["curves"].values():
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            rows.setdefault(row["update"], {}).update(row)
    for tracker in trackers:
        for update, row in sorted(rows.items()):  # most of them want rising updates
            tracker.log(scalars_of(row), step=update)
        tracker.log({f"results/{name}": value for name, value in run["results"].items()}, step=run["updates_done"])
        tracker.finish()


def finish(run: BaseRun, spec: RunSpec, curves: Curves, error: str | None) -> tuple[dict[str, Any], str | None]:
    """The sections of a run's record, and why it diverged if it did: in training (`error`), or by what it ended as."""
    if error is None:
        try:
            return measure(run, spec, curves), None
        except Diverged as reason:
            error = str(reason)
    return {"train": {**_course(run), "results": {}}, "curves": curves.to_dict()}, error


def measure(run: BaseRun, spec: RunSpec, curves: Curves) -> dict[str, Any]:
    """Sections of a run that was trained to its end; raises `Diverged` if samples are not finite."""
    started, kind_results = time.perf_counter(), results_of(run.kind)
    needs_samples = any("samples" in METRICS[name].needs for name in spec.metrics)
    samples = _finite(kind_results.samples_to_evaluate(run)) if needs_samples else None
    sampled = time.perf_counter()
    run.sampling_seconds = sampled - started
    results = kind_results.evaluate(run, samples, spec.metrics)
    results |= {name: value for name, value in curves.last_quality.items() if name in spec.metrics}
    sections: dict[str, Any] = {"curves": curves.to_dict()}
    if spec.stage == "compare":
        num = kind_results.num_recorded
        if samples is None:
            with run.averaged_weights():
                samples = _finite(draw_samples(run, num, "distances"))
        sections["samples"] = kind_results.recorded(samples[:num])
        if run.kind.is_compared_between_runs:
            sections["fixed_start"] = kind_results.recorded(_finite(_from_fixed_start(run)))
    run.evaluation_seconds += time.perf_counter() - sampled
    return {"train": {**_course(run), "results": results}, **sections}


def _from_fixed_start(run: BaseRun) -> np.ndarray:
    """Samples that the averaged weights make by DDIM from noise that is the same for all runs: `(500, ...)`."""
    with run.averaged_weights(), torch.no_grad():
        pipeline = run.kind.make_pipeline(run.bare_model.eval(), DDIMScheduler.from_config(run.process.scheduler.config))
        pipeline.set_progress_bar_config(disable=True)
        generator = stream_generator(0, "fixed-start", device=run.bare_model.device)
        steps = min(_FIXED_STEPS, run.config.ddpm_num_steps)
        return run.kind.sample(pipeline, _FIXED_SAMPLES, generator, steps)


def _finite(samples: Any) -> Any:
    if samples is not None and not np.isfinite(samples).all():
        raise Diverged("The samples at the end are not finite.")
    return samples


def _course(run: BaseRun) -> dict[str, Any]:
    return {
        "data_fingerprint": run.data.fingerprint,
        "num_updates": run.plan.num_updates,
        "updates_done": run.update,
        "model": run.plan.model_config,
        "num_parameters": run.plan.num_parameters,
        "global_batch": run.plan.layout.global_batch,
        "largest_lr_deviation": run.audit.largest_lr_deviation,
        "training_seconds": run.training_seconds,
        "sampling_seconds": run.sampling_seconds,
        "evaluation_seconds": run.evaluation_seconds,
    }
