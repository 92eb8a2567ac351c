"""The result of the finder: as text, as data, as a plot and in the folder of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError
from ..core.files import write_text
from ..core.options import names_where
from ..core.plotting import BLUE, GREY, ORANGE, new_figure, plain_axes, save_figure
from ..core.words import counted
from ..training.config import TrainingConfig, complete_options
from ..training.record_schema import problem_in
from ..training.run_folder import FINDER_FILES
from .range_test import FinderConfig, Sweep

if TYPE_CHECKING:
    from .suggestions import Suggestion

_DISAGREE = 3.0  # a factor
_STYLES = {"steepest": (BLUE, "steepest"), "minimum_tenth": (ORANGE, "a tenth of the minimum")}
_SAVED = {
    **{"learning_rate": float | None, "settings.rule": str, "sweeps": list[dict], "seconds": float},
    "suggestions": dict[str, dict],
}


@dataclass(frozen=True, repr=False)
class FinderResult:
    """The result of the finder."""

    settings: FinderConfig  # resolved
    sweeps: tuple[Sweep, ...]  # one per test
    suggestions: dict[str, Suggestion]  # one per rule, over all tests
    seconds: float
    about: dict[str, Any]  # data, model, optimizer, batch and machine

    @property
    def suggestion(self) -> Suggestion:
        """The suggestion of the chosen rule."""
        return self.suggestions[self.settings.rule]

    @property
    def lr(self) -> float:
        """The suggested learning rate, with two significant digits; a `LabError` if the rule suggests none."""
        if self.suggestion.lr is None:
            raise LabError(
                f"The finder's rule {self.settings.rule!r} suggests no learning rate: {self.suggestion.reason}. Give "
                "--learning_rate, or try another range or rule with `lrlab find-lr`."
            )
        return float(f"{self.suggestion.lr:.1e}")

    def describe(self) -> str:
        settings, losses, num = self.settings, self.sweeps[0].losses, len(self.sweeps)
        reached = max((float(sweep.lrs[-1]) for sweep in self.sweeps if len(sweep.lrs)), default=0.0)
        start = f"; loss {losses[0]:.3g} at the start" if len(losses) else ""
        beyond = f", then on to {reached:.3g}" if reached > 1.01 * settings.end_lr else ""
        lines = [
            f"{counted(num, 'test')} from {settings.start_lr:.3g} to {settings.end_lr:.3g} in "
            f"{counted(settings.num_updates, 'update')}{beyond}, {self.seconds:.1f} s{start}"
        ]
        for name, suggestion in self.suggestions.items():
            interval = "" if suggestion.interval is None else " ({:.2g} to {:.2g})".format(*suggestion.interval)
            rate = "none" if suggestion.lr is None else f"{suggestion.lr:.2g}{interval}"
            taken = " (taken)" if name == settings.rule and suggestion.lr is not None else ""
            lines.append(f"{name:>13}  {rate}{taken}: {suggestion.reason}")
        lines += sorted({sweep.ended[0].upper() + sweep.ended[1:] + "." for sweep in self.sweeps if sweep.ended})
        if apart := disagreement(self.suggestions):
            lines.append(apart)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FinderResult({self.suggestions}, rule={self.settings.rule!r})"

    def to_dict(self) -> dict[str, Any]:
        """As data, with `None` for losses that are not finite."""
        return {
            "learning_rate": None if self.suggestion.lr is None else self.lr,
            "settings": dataclasses.asdict(self.settings),
            "suggestions": {name: one._asdict() for name, one in self.suggestions.items()},
            "disagreement": disagreement(self.suggestions),
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


def disagreement(suggestions: dict[str, Suggestion]) -> str | None:
    """A warning if the rules' rates differ by more than a factor of 3, else `None`."""
    rates = sorted((suggestion.lr, name) for name, suggestion in suggestions.items() if suggestion.lr is not None)
    if not rates or (ratio := rates[-1][0] / rates[0][0]) <= _DISAGREE:
        return None
    (low, lowest), (high, highest) = rates[0], rates[-1]
    return (
        f"The rules disagree: {highest} suggests {high:.3g}, {lowest} {low:.3g}, {ratio:.1f} times less. Look at the "
        "curve, and try both."
    )


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
    is_whole = not problem_in(found, _SAVED) and found["settings"]["rule"] in found["suggestions"]
    return found if is_whole and _comparable(then) == _comparable(now) else None


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """No parameters are the same, resolved or not."""
    return {**settings, "config": {name: value if value != {} else None for name, value in settings["config"].items()}}


# --- plot --------------------------------------------------------------------------------------------------------------


def finder_figure(result: FinderResult) -> Any:
    """Tests as thin lines, their median as a thick one, a line and a band for each rule."""
    from .suggestions import FEWEST, smooth_as_needed  # with SciPy, which a reader of saved results does not need

    figure = new_figure(7.2, 4, dpi=150)
    axes, sweeps = figure.subplots(), result.sweeps
    for sweep in sweeps:
        axes.plot(sweep.lrs, sweep.losses, color=GREY, linewidth=0.7, alpha=0.8)
    shortest = min(len(sweep.lrs) for sweep in sweeps)  # the part that all tests reached
    losses = np.median([sweep.losses[:shortest] for sweep in sweeps], axis=0)
    finite = losses[: int(np.argmin(np.isfinite([*losses, np.nan])))]
    if len(finite) >= FEWEST:
        curve, _, _ = smooth_as_needed(finite)
        label = "median of the tests, smoothed"
        axes.plot(sweeps[0].lrs[: len(curve)], curve, color="black", linewidth=1.8, label=label)
    for name, suggestion in result.suggestions.items():
        color, label = _STYLES[name]
        if suggestion.lr is None:
            axes.plot([], [], color=color, linestyle=":", label=f"{label}: none")
            continue
        taken = ", taken" if name == result.settings.rule else ""
        axes.axvline(suggestion.lr, color=color, label=f"{label}: {suggestion.lr:.2g}{taken}")
        if suggestion.interval is not None:
            axes.axvspan(*suggestion.interval, color=color, alpha=0.1, linewidth=0)
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
