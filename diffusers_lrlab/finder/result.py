"""The result of the finder: as text, as data, as a plot and in the folder of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.files import write_text
from ..core.options import names_where
from ..core.plotting import GREY, ORANGE, new_figure, plain_axes, save_figure
from ..core.words import counted
from ..training.config import TrainingConfig, complete_options
from ..training.record_schema import problem_in
from ..training.run_folder import FINDER_FILES
from .range_test import FinderConfig, Sweep
from .suggestions import FEWEST, Suggestion, smooth_as_needed

_SAVED = {"learning_rate": float | None, "sweeps": list[dict], "seconds": float, "suggestion.reason": str}


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
                {**sweep._asdict(), "lrs": sweep.lrs.tolist(), "losses": _finite(sweep.losses)} for sweep in self.sweeps
            ],
            "seconds": self.seconds,
            "about": self.about,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FINDER_FILES[0], json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        save_figure(finder_figure(self), folder / FINDER_FILES[1])


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


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
