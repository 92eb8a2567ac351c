"""What the losses at rising rates say: the suggested learning rate, as text, data and plot, and in the folder of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import LabError, must_be
from ..core.files import write_text
from ..core.options import names_where
from ..core.plotting import GREY, ORANGE, new_figure, plain_axes, save_figure
from ..core.words import counted
from ..training.config import TrainingConfig, complete_options
from ..training.record_schema import problem_in
from ..training.run_folder import FINDER_FILES
from .range_test import FinderConfig, Sweep, noise_of

FEWEST = 5  # readings that a suggestion needs
_SMALLEST_FALL = 0.02  # share of the loss at the start
# In standard errors of the smoothed curve. The minimum of a curve that does not fall is less than 3.5 errors below its start
# in 99 of 100 curves of 200 readings, in 95 of 20 to 100 readings, and in 90 of the shortest.
_SIGNIFICANT, _CLEAR = 3.5, 8.0  # a fall that counts; one that needs no more smoothing
_SPIKE = 20.0  # times the third quartile of nearby distances to the median of 3
_FINEST, _COARSEST = 50, 12.5  # widths of the smoothing kernel per curve
_SAVED = {"learning_rate": float | None, "sweeps": list[dict], "seconds": float, "suggestion.reason": str}


class Suggestion(NamedTuple):
    """A suggested learning rate, if any."""

    lr: float | None
    reason: str  # also of no rate
    interval: tuple[float, float] | None = None  # equally good rates


def minimum_tenth(lrs: ArrayLike, losses: ArrayLike) -> Suggestion:
    """
    A tenth of the rate at the middle of the smoothed loss's flat bottom: the usual rule of thumb.

    At the bottom, the loss is above its minimum by less than 5 % of the whole fall; the position of the minimum within it is
    due to chance.

    Args:
        lrs (`ArrayLike`): Rising rates above 0, `(num_readings,)`.
        losses (`ArrayLike`): The loss at each, of the same shape; those from the first non-finite one on are ignored.

    Returns:
        [`Suggestion`]: its interval is a tenth of both ends of the bottom.
    """
    from scipy.ndimage import label

    rates, values = np.asarray(lrs, np.float64), np.asarray(losses, np.float64)
    if rates.shape != values.shape or rates.ndim != 1:
        raise ValueError(f"lrs and losses have the shapes {rates.shape} and {values.shape}; give two of (num_readings,).")
    if not ((rates > 0).all() and (np.diff(rates) > 0).all()):
        raise must_be("lrs", rates, "above 0, each above the one before", "give the rates in the order of the test")
    finite = np.isfinite(values)
    end = len(values) if finite.all() else int(np.argmin(finite))
    if end < FEWEST:
        what = "not finite from the start" if end == 0 and len(values) else f"known at {end} rates only"
        return Suggestion(None, f"the loss is {what}; at least {FEWEST} readings are needed")
    x, is_truncated = np.log10(rates[:end]), end < len(finite)
    y, error, widths = smooth_as_needed(values[:end])
    best = int(np.argmin(y))
    if y[0] - y[best] <= max(_SMALLEST_FALL * abs(y[0]), _SIGNIFICANT * error):
        return _no_fall(rates[:end], y, _SIGNIFICANT * error)
    if best == len(y) - 1:
        at = _rate(x[-1])
        if is_truncated:
            return Suggestion(at / 10, f"a tenth of the last rate with a finite loss, {at:.3g}", (at / 100, at / 10))
        return Suggestion(None, f"the loss still falls at the highest rate, {at:.3g}; raise --end_lr to see its minimum")
    chance = 0.0 if widths == _FINEST else error  # the finest smoothing leaves no doubt
    runs, _ = label(y <= y[best] + max(0.05 * (y[0] - y[best]), chance))
    bottom = x[runs == runs[best]]
    low, high = bottom[0], bottom[-1]
    at = _rate((low + high) / 2)
    return Suggestion(at / 10, f"a tenth of the rate with the lowest loss, {at:.3g}", (_rate(low) / 10, _rate(high) / 10))


def combine(suggestions: Sequence[Suggestion]) -> Suggestion:
    """
    The suggestion of repeated tests: the median on a logarithmic scale, with the range of all rates and intervals; no
    rate unless more than half of the tests suggest one.
    """
    named = [suggestion for suggestion in suggestions if suggestion.lr is not None]
    if 2 * len(named) <= len(suggestions):
        without = [suggestion for suggestion in suggestions if suggestion.lr is None]
        return max(without, key=without.count) if without else Suggestion(None, "no test was done")
    if len(named) == 1:
        return named[0]
    rates = [suggestion.lr for suggestion in named if suggestion.lr is not None]
    ends = rates + [end for suggestion in named for end in (suggestion.interval or ())]
    reason = f"{named[0].reason.partition(',')[0]}, by the median of {counted(len(named), 'test')}"
    return Suggestion(_rate(float(np.median(np.log10(rates)))), reason, (min(ends), max(ends)))


def smooth_as_needed(losses: ArrayLike) -> tuple[np.ndarray, float, float]:
    """
    The curve, smoothed until its fall (from its start to its minimum) is significant; the standard error of this fall; and
    the number of smoothing widths per curve. A median of 3 removes spikes, and a Gaussian fine noise.

    A Gaussian over independent readings has the standard error `noise / sqrt(2 * sqrt(pi) * sigma)`; at an end, where the
    curve is mirrored, `sqrt(2)` times that. The noise changes with the rate, so it is estimated from nearby readings,
    without the single spikes that the median removes.
    """
    from scipy.ndimage import gaussian_filter1d, median_filter

    values, widths = np.asarray(losses, np.float64), float(_FINEST)
    near = max(8, len(values) // 8)
    middle = median_filter(values, 3, mode="nearest")
    off = np.abs(values - middle)

    def noise_from(first: int) -> float:
        nearby = slice(first, first + near)
        is_spike = off[nearby] / _SPIKE > np.quantile(off[nearby], 0.75)
        return noise_of(np.where(is_spike, middle[nearby], values[nearby]))

    while True:
        sigma = max(0.5, len(values) / widths)
        y = gaussian_filter1d(middle, sigma)
        best, inside = int(np.argmin(y)), 1 / (2 * math.sqrt(math.pi) * sigma)
        first = max(0, min(best + 2, len(values)) - near)
        at_best = 2 * inside if best > len(values) - 1 - sigma else inside
        error = math.hypot(noise_from(0) * math.sqrt(2 * inside), noise_from(first) * math.sqrt(at_best))
        if y[0] - y[best] > _CLEAR * error or widths <= _COARSEST:
            return y, error, widths
        widths /= 2


def _no_fall(rates: np.ndarray, y: np.ndarray, noise: float) -> Suggestion:
    smallest = _SMALLEST_FALL * abs(y[0])
    rises = " and rises" if y[-1] > y[0] + max(smallest, noise) else ""
    least = f"by at least {100 * _SMALLEST_FALL:.0f} %"
    if noise > smallest:
        least = f"by more than the noise of independent losses, which can be {100 * noise / (abs(y[0]) or 1):.0f} % of it"
    remedy = "lower --start_lr" if rises else "raise --end_lr, use more updates or a larger batch"
    text = f"the loss does not fall{rises} between {rates[0]:.3g} and {rates[-1]:.3g} {least}; {remedy}"
    return Suggestion(None, f"{text}, or check data and model")


def _rate(log10: float) -> float:
    return float(10.0**log10)


@dataclass(frozen=True, repr=False)
class FinderResult:
    """The result of the finder."""

    settings: FinderConfig  # resolved
    sweeps: tuple[Sweep, ...]  # one per test
    suggestion: Suggestion  # over all tests
    seconds: float
    about: dict[str, Any]  # data, model, optimizer, batch and machine

    @property
    def lr(self) -> float:
        """The suggested learning rate, with two significant digits; a `LabError` if there is none."""
        if self.suggestion.lr is None:
            raise LabError(
                f"The finder suggests no learning rate: {self.suggestion.reason}. Give --learning_rate, or try another "
                "range with `lrlab find-lr`."
            )
        return float(f"{self.suggestion.lr:.1e}")

    def describe(self) -> str:
        settings, losses, suggestion = self.settings, self.sweeps[0].losses, self.suggestion
        reached = max((float(sweep.lrs[-1]) for sweep in self.sweeps if len(sweep.lrs)), default=0.0)
        start = f"; loss {losses[0]:.3g} at the start" if len(losses) else ""
        beyond = f", then on to {reached:.3g}" if reached > 1.01 * settings.end_lr else ""
        interval = "" if suggestion.interval is None else " ({:.2g} to {:.2g})".format(*suggestion.interval)
        rate = "none" if suggestion.lr is None else f"{suggestion.lr:.2g}{interval}"
        lines = [
            f"{counted(len(self.sweeps), 'test')} from {settings.start_lr:.3g} to {settings.end_lr:.3g} in "
            f"{counted(settings.num_updates, 'update')}{beyond}, {self.seconds:.1f} s{start}",
            f"Suggested learning rate: {rate}: {suggestion.reason}",
        ]
        lines += sorted({sweep.ended[0].upper() + sweep.ended[1:] + "." for sweep in self.sweeps if sweep.ended})
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FinderResult({self.suggestion})"

    def to_dict(self) -> dict[str, Any]:
        """As data, with `None` for losses that are not finite."""
        one = self.suggestion
        return {
            "learning_rate": None if one.lr is None else self.lr,
            "settings": dataclasses.asdict(self.settings),
            "suggestion": {"lr": one.lr, "reason": one.reason, "interval": one.interval},
            "sweeps": [
                {
                    **sweep._asdict(),
                    "lrs": sweep.lrs.tolist(),
                    "losses": [loss if math.isfinite(loss) else None for loss in sweep.losses.tolist()],
                }
                for sweep in self.sweeps
            ],
            "seconds": self.seconds,
            "about": self.about,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FINDER_FILES[0], json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        save_figure(finder_figure(self), folder / FINDER_FILES[1])


# --- in the folder of a run --------------------------------------------------------------------------------------------


def deciding(config: dict[str, Any], num_parameters: int, global_batch: int) -> dict[str, Any]:
    """The settings that the best learning rate depends on, as data."""
    config = complete_options(config)
    fields = {name: config[name] for name in names_where(TrainingConfig, finder="compares")}
    fields["mixed_precision"] = fields["mixed_precision"] or "no"
    return json.loads(json.dumps({"config": fields, "num_parameters": num_parameters, "global_batch": global_batch}))


def read_saved_result(folder: Path, run: Any) -> dict[str, Any] | None:
    """
    The finder's result in the folder of a run, given by its [`Plan`] or record; `None` if it is missing, damaged, or of
    another run.
    """
    try:
        found = json.loads((folder / "lrlab" / FINDER_FILES[0]).read_text(encoding="utf-8"))
        then = deciding(**found["about"]["deciding"])  # with options added since then
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(run, dict):
        now = deciding(run["config"], run["train"]["num_parameters"], run["train"]["global_batch"])
    else:
        now = deciding(run.config.to_dict(), run.num_parameters, run.layout.global_batch)
    return found if not problem_in(found, _SAVED) and _comparable(then) == _comparable(now) else None


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """No parameters are the same, resolved or not."""
    return {**settings, "config": {name: value if value != {} else None for name, value in settings["config"].items()}}


# --- plot --------------------------------------------------------------------------------------------------------------


def finder_figure(result: FinderResult) -> Any:
    """Tests as thin lines, their median as a thick one, a line and a band for the suggestion."""
    figure = new_figure(7.2, 4, dpi=150)
    axes, sweeps, suggestion = figure.subplots(), result.sweeps, result.suggestion
    for sweep in sweeps:
        axes.plot(sweep.lrs, sweep.losses, color=GREY, linewidth=0.7, alpha=0.8)
    shortest = min(len(sweep.lrs) for sweep in sweeps)  # the part that all tests reached
    losses = np.median([sweep.losses[:shortest] for sweep in sweeps], axis=0)
    finite = losses[: int(np.argmin(np.isfinite([*losses, np.nan])))]
    if len(finite) >= FEWEST:
        curve, _, _ = smooth_as_needed(finite)
        label = "median of the tests, smoothed"
        axes.plot(sweeps[0].lrs[: len(curve)], curve, color="black", linewidth=1.8, label=label)
    if suggestion.lr is None:
        axes.plot([], [], color=ORANGE, label="no suggestion")
    else:
        axes.axvline(suggestion.lr, color=ORANGE, label=f"suggested: {suggestion.lr:.2g}")
    if suggestion.interval is not None:
        axes.axvspan(*suggestion.interval, color=ORANGE, alpha=0.1, linewidth=0)
    label = "training loss of a batch" if "script" in result.about else "loss of the probe"
    axes.set(xscale="log", xlabel="learning rate", ylabel=label, ylim=_limits(losses))
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _limits(losses: np.ndarray) -> tuple[float, float]:
    """Limits that keep an explosion at the end from flattening the valley."""
    finite = losses[np.isfinite(losses)]
    low, start = (float(finite.min()), float(finite[0])) if len(finite) else (0.0, 1.0)
    margin = 0.05 * max(start - low, 1e-3 * abs(start))
    return low - 2 * margin, start + 6 * margin
