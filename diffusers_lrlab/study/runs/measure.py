"""From a finished run to the record of it: the same for a member of a stack and for a run by itself."""

from __future__ import annotations

import base64
import io
import time
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler

from ...core.errors import Diverged
from ...core.streams import stream_generator
from ...training.results.select import results_of
from ...training.run_state import RunState
from ...training.samples import draw_samples
from ..spec.metrics import sample_metrics
from ..spec.spec import RunSpec
from .curves import Curves
from .landscape import sharpness

_SHOWN, _SHOWN_IMAGES = 1000, 16  # points and images that the record keeps for pictures
_COLUMNS = 4
_FIXED_POINTS, _FIXED_STEPS = 500, 50


def finish(run: RunState, spec: RunSpec, curves: Curves, error: str | None) -> tuple[dict[str, Any], str | None]:
    """
    The sections of a run's record, and why it diverged if it did: before (`error`), or by what it is at its end.

    Args:
        run ([`RunState`]): Trained as far as it came.
        spec ([`RunSpec`]): What it is and what is asked about it.
        curves ([`Curves`]): Of its training.
        error (`str` or `None`): Why training ended early.
    """
    if error is None:
        try:
            return measure(run, spec, curves.to_dict(), curves.last_quality), None
        except Diverged as reason:
            error = str(reason)
    return {"train": {**_course(run), "results": {}}, "curves": curves.to_dict()}, error


def measure(run: RunState, spec: RunSpec, curves: dict[str, Any], last_quality: dict[str, float]) -> dict[str, Any]:
    """
    What the record of a run says about its end.

    Args:
        run ([`RunState`]): Trained to its end.
        spec ([`RunSpec`]): What it is and what is asked about it.
        curves (`dict`): Of [`Curves`].
        last_quality (`dict`): The last validation losses.

    Returns:
        `dict`: sections `train`, `curves`, `samples` and `fixed_start`.

    Raises:
        Diverged: if samples are not finite.
    """
    started = time.perf_counter()
    samples = _finite(results_of(run.kind).samples_to_evaluate(run)) if _needs_samples(spec) else None
    sampled = time.perf_counter()
    run.sampling_seconds = sampled - started
    results = results_of(run.kind).evaluate(run, samples, spec.metrics)
    results |= {name: value for name, value in last_quality.items() if name in spec.metrics}
    if "sharpness" in spec.metrics:
        with run.averaged_weights():
            results["sharpness"] = sharpness(run)
    sections: dict[str, Any] = {"curves": curves}
    if spec.stage == "compare":
        of_points = run.config.point_column is not None
        num = _SHOWN if of_points else _SHOWN_IMAGES
        shown = samples[:num] if samples is not None else _finite(_some_samples(run, num))
        sections["samples"] = {"points": _rounded(shown)} if of_points else {"png": _as_png(run, shown)}
        if of_points:
            sections["fixed_start"] = {"points": _rounded(_finite(from_fixed_start(run)))}
    run.evaluation_seconds += time.perf_counter() - sampled
    return {"train": {**_course(run), "results": results}, **sections}


def make_record(
    spec: RunSpec, sections: dict[str, Any], error: str | None, executor: dict[str, Any], started: str, meta: dict[str, Any]
) -> dict[str, Any]:
    """
    The whole record.

    Args:
        spec ([`RunSpec`]): What was asked for.
        sections (`dict`): Of [`measure`] or [`diverged`].
        error (`str` or `None`): Why it diverged.
        executor (`dict`): How it was done.
        started (`str`): ISO time.
        meta (`dict`): Versions and hardware.
    """
    return {
        "run": {
            "id": spec.id,
            "arm": spec.arm,
            "dataset": spec.dataset,
            "seed": spec.seed,
            "stage": spec.stage,
            "learning_rate": spec.config.learning_rate,
            "status": "finished" if error is None else "diverged",
            "error": error,
            "executor": executor,
            "started": started,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        **sections,
        "config": spec.fields,
        "meta": meta,
    }


def _finite(samples: Any) -> Any:
    if samples is not None and not np.isfinite(samples).all():
        raise Diverged("The samples at the end are not finite.")
    return samples


def _needs_samples(spec: RunSpec) -> bool:
    return bool((sample_metrics() | {"exact_kl"}) & {*spec.metrics})


def _course(run: RunState) -> dict[str, Any]:
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


def _some_samples(run: RunState, num: int) -> np.ndarray:
    with run.averaged_weights():
        return draw_samples(run, num, "distances")


def _as_png(run: RunState, samples: np.ndarray) -> str:
    """Images `(num, height, width, channels)` in [0, 1] as one PNG, four in a row, in base64."""
    from PIL import Image

    images = run.kind.preview(samples)
    rows = [np.concatenate(list(images[start : start + _COLUMNS]), axis=1) for start in range(0, len(images), _COLUMNS)]
    grid = np.concatenate([row for row in rows if row.shape == rows[0].shape])
    file = io.BytesIO()
    Image.fromarray(grid.squeeze(-1) if grid.shape[-1] == 1 else grid).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def from_fixed_start(run: RunState) -> np.ndarray:
    """Points that the averaged weights make by DDIM from noise that is the same for all runs: `(500, dimension)`."""
    with run.averaged_weights(), torch.no_grad():
        pipeline = run.kind.make_pipeline(run.bare_model.eval(), DDIMScheduler.from_config(run.noise_scheduler.config))
        pipeline.set_progress_bar_config(disable=True)
        generator = stream_generator(0, "fixed-start", device=run.bare_model.device)
        steps = min(_FIXED_STEPS, run.config.ddpm_num_steps)
        return run.kind.sample(pipeline, _FIXED_POINTS, generator, steps)


def _rounded(points: np.ndarray) -> list[list[float]]:
    return np.round(points.astype(np.float64), 4).tolist()
