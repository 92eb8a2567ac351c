"""The result of the finder: as an object, as text, as data and in files."""

import base64
import dataclasses
import html
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.files import write_text
from ..core.plotting import save_figure
from ..core.words import counted
from ..training.run_folder import FINDER_FILES
from .plot import finder_figure
from .range_test import FinderConfig
from .readings import Sweep
from .suggestions import Suggestion, disagreement


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
        if probe := self.about.get("probe"):
            lines.append(f"Probe: {probe}.")
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
        suggested = {name: None if one.lr is None else float(f"{one.lr:.1e}") for name, one in self.suggestions.items()}
        return f"FinderResult({', '.join(f'{name}={lr}' for name, lr in suggested.items())}, rule={self.settings.rule!r})"

    def _repr_html_(self) -> str:
        """For notebooks: the plot and the text of [`describe`]."""
        self._figure().savefig(file := io.BytesIO(), format="png")
        image = base64.b64encode(file.getvalue()).decode()
        alt = f"Loss over the learning rate, and the suggestion of each rule: {self!r}"
        return (
            f'<img src="data:image/png;base64,{image}" alt="{html.escape(alt)}" style="max-width: 100%">'
            f"<pre>{html.escape(self.describe())}</pre>"
        )

    def to_dict(self) -> dict[str, Any]:
        """As data, with `None` for losses that are not finite."""
        return {
            "learning_rate": None if self.suggestion.lr is None else self.lr,
            "settings": dataclasses.asdict(self.settings),
            "suggestions": {
                name: {"lr": one.lr, "reason": one.reason, "interval": one.interval}
                for name, one in self.suggestions.items()
            },
            "disagreement": disagreement(self.suggestions),
            "sweeps": [
                {
                    "lrs": sweep.lrs.tolist(),
                    "losses": _finite(sweep.losses),
                    "losses_by_noise": [_finite(row) for row in sweep.bins],
                    "num_updates": sweep.num_updates,
                    "ended": sweep.ended,
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
        save_figure(self._figure(), folder / FINDER_FILES[1])

    def _figure(self) -> Any:
        return finder_figure(self.settings, self.sweeps, self.suggestions)


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
