"""`lrlab predict`: the loss that schedules would reach, from runs of other schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import must_be
from ..core.listing import aligned
from ..core.plotting import COLORS, new_figure, plain_axes, plain_log_scale, save_figure
from ..core.progress import resolve_warmup_updates
from ..core.ranges import COUNT, POSITIVE, Range
from ..core.words import counted
from ..forecast.law_check import check_input
from ..forecast.loss_forecast import Candidate, Forecaster, Predicted, make_forecaster, mean_curve, notes_of_extrapolation
from ..preview.plots import draw_interval, draw_measured
from ..preview.schedules import Losses, MeasuredLosses
from ..schedules.registries import COOLDOWNS
from ..schedules.resolve import resolve_schedule
from ..schedules.schedule import Schedule
from .known_floor import floor_of_run
from .loss_curves import METRICS, MeasuredRun, by_schedule, merged_parts, read_runs

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of a run, for its decay
_JOINED = ("rex", "exponential", "polynomial:power=2")  # after a constant rate
_USUAL = ("constant_with_warmup", "cosine", "linear", "rex")


@dataclass(frozen=True)
class LossForecast:
    """What can be predicted from some runs; `forecaster.check` says whether to trust it."""

    runs: list[MeasuredRun]
    metric: str
    forecaster: Forecaster

    @property
    def longest(self) -> int:
        """Updates of the longest run."""
        return max(run.rates.num_updates for run in self.runs)

    @property
    def specs(self) -> list[str]:
        """The schedules of the runs."""
        return [*dict.fromkeys(run.rates.text for run in self.runs)]

    def candidate(
        self,
        spec: str,
        num_updates: int | None = None,
        learning_rate: float | None = None,
        warmup: float | None = None,
    ) -> Candidate:
        """
        A schedule by name or spec string, with its length in updates (default: that of the longest run), its peak learning
        rate (that of the first run) and its warm-up in updates or as a fraction (as in the runs).
        """
        schedule = predictable(spec)
        num_updates = self.longest if num_updates is None else num_updates
        COUNT.check("--max_train_steps", num_updates, "it is the length of the run to predict")
        rate = self.runs[0].rates.lr if learning_rate is None else learning_rate
        POSITIVE.check("--learning_rate", rate, "it is the peak of the run to predict")
        if warmup is None:
            warmup = max(run.options["lr_warmup_steps"] or 0 for run in self.runs)
        Range("[0, inf)").check("--lr_warmup_steps", warmup, "it counts updates, or is a fraction of the run")
        warmup = 0 if {"no_warmup", "rises"} & schedule.traits else resolve_warmup_updates(warmup, num_updates)
        curve = dataclasses.replace(self.runs[0].rates, schedule=schedule, lr=rate, warmup_updates=warmup)
        return Candidate(spec, curve.lasting(num_updates).lrs, warmup)

    def search(self, num_updates: int | None, learning_rate: float | None, warmup: float | None) -> list[Predicted]:
        """
        Predictions of cool-downs of all shapes and lengths, and of a constant rate joined with other decays: the lowest
        loss first.
        """
        length = self.longest if num_updates is None else num_updates
        given = length, learning_rate, warmup
        shares = self._searched_shares(*given)
        specs = [f"warmup_stable_decay:num_decay_steps={share},decay_type={form}" for form in COOLDOWNS for share in shares]
        for decay in _JOINED:
            specs += [f"join:schedules=[constant|{decay}],boundaries=[{1 - share:g}]" for share in shares]
        found = [self.forecaster.predict(self.candidate(spec, *given)) for spec in (*specs, *_USUAL)]
        return sorted(found, key=lambda one: one.final)

    def _searched_shares(self, length: int, learning_rate: float | None, warmup: float | None) -> list[float]:
        """The lengths of decays that [`search`] tries, as shares of the run."""
        start = self.candidate("constant_with_warmup", length, learning_rate, warmup).warmup_updates / length
        return [share for share in _SHARES if share + start < 1]

    def edge_in_words(self, best: Predicted) -> str:
        """A note if the decay of a schedule is the shortest or the longest of those that were searched, else nothing."""
        candidate, share = best.candidate, _share_of_decay(best.candidate.label)
        shares = self._searched_shares(len(candidate.lrs), None, candidate.warmup_updates)
        if share is None or share not in (shares[0], shares[-1]):
            return ""
        extreme, beyond = ("longest", "longer") if share == shares[-1] else ("shortest", "shorter")
        return (
            f"Its decay takes {share:.0%} of the run, the {extreme} that was searched, so a {beyond} one may be better: "
            "give it as --lr_scheduler."
        )

    def equally_good(self, found: Sequence[Predicted]) -> int:
        """The number of predictions, lowest first, that the error of the law leaves as good as the first one."""
        return sum(one.final <= found[0].final * (1 + self.forecaster.check.error) for one in found)

    def flags_of(self, candidate: Candidate) -> list[str]:
        """The options of `lrlab train` that give a run this schedule."""
        first = self.runs[0]
        rate = candidate.lrs.max() * first.options["learning_rate"] / first.rates.lr  # without --scale_lr
        flags = {"lr_scheduler": candidate.label, "max_train_steps": len(candidate.lrs), "learning_rate": f"{rate:g}"}
        flags |= {"lr_warmup_steps": candidate.warmup_updates}
        return [f"--{name}={value}" for name, value in flags.items()]

    def describe_runs(self) -> str:
        """The runs and the check of the laws."""
        schedules = self.forecaster.curves
        seeds = len({run.seed for run in self.runs})
        lines = [f"{counted(len(schedules), 'schedule')} of {counted(seeds, 'seed')}, {self.metric}:"]
        lines += [f"  {curve.label}: {curve.losses[-1]:.5g} at the end" for curve in schedules]
        return "\n".join([*lines, "", self.forecaster.check.describe()])

    def describe(self, predicted: Sequence[Predicted]) -> str:
        """The predictions as a table, and where they go beyond the runs."""
        rows = [["schedule", "updates", "peak", "predicted", "95 % over seeds"]]
        for one in predicted:
            lrs = one.candidate.lrs
            interval = "-" if one.interval is None else "{:.5g} to {:.5g}".format(*one.interval)
            rows.append([one.candidate.label, f"{len(lrs)}", f"{lrs.max():g}", f"{one.final:.5g}", interval])
        notes = notes_of_extrapolation(predicted)
        if any(one.interval for one in predicted):
            notes.append("The interval shows how much the fit depends on the seeds.")
        else:
            notes.append("There is no interval over seeds: it needs two seeds that all schedules share.")
        notes.append(f"The law itself is off by {self.forecaster.check.error:.3%} in its check.")
        return "\n".join([f"Predicted {self.metric} at the end:", aligned(rows), *notes])

    def as_data(self, predicted: Sequence[Predicted]) -> dict[str, Any]:
        """The check and the predictions, for JSON."""
        return {
            "metric": self.metric,
            "floor": None if self.forecaster.floor is None else np.mean(self.forecaster.floor),
            "check": self.forecaster.check.as_data(),
            "predicted": [as_data(one) for one in predicted],
        }

    def losses_to_draw(self, predicted: Sequence[Predicted]) -> Losses:
        """
        Predicted losses, numbered in order, and measured ones: in the colour of the prediction for the same rates, or else
        in a separate colour.
        """
        numbers = {one.candidate.lrs.tobytes(): index for index, one in enumerate(predicted)}
        measured = []
        for curve in self.forecaster.curves:
            color = numbers.setdefault(curve.lrs.tobytes(), len(numbers))
            measured.append(MeasuredLosses(curve.label, (curve.updates, curve.losses), color))
        return Losses(
            {one.candidate.label: (one.updates, one.losses) for one in predicted},
            {one.candidate.label: one.interval for one in predicted if one.interval is not None},
            measured,
        )

    def plot(self, predicted: Sequence[Predicted], path: Path) -> None:
        """Draws learning rates, and below them measured losses (dots) and predicted ones (lines)."""
        figure = new_figure(7, 6, dpi=150)
        upper, lower = figure.subplots(2, 1, sharex=True)
        for curve, measured in zip(self.forecaster.curves, self.losses_to_draw(predicted).measured, strict=True):
            is_named = measured.color >= len(predicted)
            color, label = COLORS[measured.color % len(COLORS)], f"measured: {measured.label}" if is_named else None
            upper.plot(curve.lrs, color=color, linewidth=0.8, linestyle=":", label=label)
            draw_measured(lower, measured, is_named)
        for index, one in enumerate(predicted):
            color = COLORS[index % len(COLORS)]
            upper.plot(one.candidate.lrs, color=color, label=one.candidate.label)
            lower.plot(one.updates, one.losses, color=color)
            draw_interval(lower, (one.updates, one.losses), one.interval, color)
        for axes, label in ((upper, "learning rate"), (lower, self.metric)):
            plain_axes(axes)
            axes.set(ylabel=label)
        lower.set(xlabel="update", title="dots: measured; lines: predicted")
        plain_log_scale(lower)
        figure.legend(*upper.get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=8)
        save_figure(figure, path)


def predictable(spec: str) -> Schedule:
    """A schedule by name or spec string; raises a `LabError` for one that no law describes."""
    schedule = resolve_schedule(spec)
    if why := schedule.more_than_a_curve:
        wanted = "a function of the clock to be predicted"
        raise must_be("--lr_scheduler", spec, wanted, "take one such as cosine", got=f"one that {why}")
    return schedule


def _share_of_decay(spec: str) -> float | None:
    """The share of a run that the decay of a schedule of [`LossForecast.search`] takes; `None` if it has no such part."""
    kwargs = resolve_schedule(spec).kwargs
    if kwargs.get("boundaries"):
        return round(1 - kwargs["boundaries"][-1], 6)
    return kwargs.get("num_decay_steps")


def as_data(predicted: Predicted) -> dict[str, Any]:
    """A prediction, for JSON."""
    return {
        "schedule": predicted.candidate.label,
        "num_updates": len(predicted.candidate.lrs),
        "final": predicted.final,
        "interval": predicted.interval,
        "extrapolates": predicted.extrapolates,
        "updates": predicted.updates.tolist(),
        "losses": predicted.losses.tolist(),
    }


def forecast_loss(
    folders: Sequence[Path],
    metric: str = METRICS[0],
    floor: float | None = None,
    law: str | None = None,
    arms: Sequence[str] = (),
    dataset: str | None = None,
) -> LossForecast:
    """
    Fits laws of the loss to runs and checks them.

    ```python
    forecast = forecast_loss([Path("study")])
    print(forecast.forecaster.check.describe())
    print(forecast.forecaster.predict(forecast.candidate("rex", 4000)).final)  # a LabError if no law passed
    ```

    Args:
        folders: Folders of runs and studies.
        metric: `"validation_loss"` or `"validation_loss_ema"`, that of the averaged weights.
        floor: The loss that no model goes below; if `None`, that of the data, as `lrlab floor` computes it, kept beside the
            run or the study; 0 for none.
        law: The only law to try: annealing, multi-power or bound.
        arms: Arms of studies to use, all by default.
        dataset: Data set of a study, needed if it has several.

    Raises:
        LabError: if there are no such losses, or too few, or if the runs differ in more than schedule, rate and length.
    """
    Range("[0, inf)").check("--floor", floor, "it is the lowest possible loss")
    runs = read_runs(folders, metric, arms, dataset)
    schedules = by_schedule(runs)
    check_input([mean_curve([*of_seeds.values()]) for of_seeds in schedules], law)  # before the floor, which takes a while
    lowest = _known_floor(runs[0]) if floor is None else floor or None
    return LossForecast(runs, metric, make_forecaster(schedules, lowest, law))


def _known_floor(run: MeasuredRun) -> float | np.ndarray:
    """The lowest possible loss on the data of a run: by part of the noise levels, if its losses are."""
    floor = floor_of_run(run)
    return float(floor.mean()) if run.by_bin is None else merged_parts(floor)
