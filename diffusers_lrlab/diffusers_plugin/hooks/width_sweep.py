"""The held-out loss of averages of many widths, after the last update of a third-party script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...averaging.posthoc import Profiles, combine, swept_widths
from ...averaging.snapshots import combined, profiles_of, read_snapshots
from ...core.files import write_text
from ..host.script_averages import SNAPSHOTS, SWEEP

if TYPE_CHECKING:
    from .ema import EMAHook


def sweep_widths(ema: EMAHook, num: int, measure: Callable[[], float]) -> tuple[float, float]:
    """
    Measures the averages of `num` widths that the snapshots give, and the first average, by calling `measure` with their
    weights in the models. Writes `ema_snapshots/sweep.json`, and returns the best width and its loss.

    All processes call this and get the same result. Only the main process reads the snapshots, since others may not see
    them.
    """
    from accelerate.utils import broadcast

    run, posthoc = ema.run, ema.averages.posthoc
    assert posthoc is not None, "checked before"
    folder, is_main = run.lab_folder / SNAPSHOTS, run.accelerator.is_main_process
    ema.averages.finish_snapshots()
    snapshots = read_snapshots(folder) if is_main else []
    profiles = profiles_of(snapshots) if is_main else None
    widths, values, residuals = swept_widths(posthoc.kwargs["sigma_rels"], num), [], []
    for width in widths:
        weights = [value.clone() for value in ema.average.shadow_params]
        if profiles is not None:
            found = combine(profiles, Profiles.of_widths([snapshots[-1].end], [width]))
            own = combined(snapshots, found.coefficients.tolist())
            for name, value in zip(ema.trained.names, weights, strict=True):
                value.copy_(own[name])
            residuals.append(found.residual)
        with ema.holding(broadcast(weights)):
            values.append(measure())
    with ema.weights():
        of_run = measure()
    if is_main:
        about: dict[str, Any] = {"update": snapshots[-1].update, "widths": widths, "residuals": residuals}
        about |= {"values": list(map(_finite, values)), "of_run": _finite(of_run)}
        write_text(folder / SWEEP, json.dumps(about, indent=1) + "\n")
    best = min(range(num), key=lambda place: values[place] if math.isfinite(values[place]) else math.inf)
    return widths[best], values[best]


def _finite(value: float) -> float | None:
    """JSON cannot hold a loss that is not finite."""
    return value if math.isfinite(value) else None
