"""The sentences of a report: what the tests show, what limits the study, and how strong its evidence is."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.words import agreeing, counted
from ..analysis.statistics import FEW_SEEDS
from ..analysis.summary import CANNOT_TELL, DIFFERENCES, DIVERGED, Verdict
from ..results import RunResult, by_cell
from ..spec.spec import ARM_NOTES
from .curves import CURVE_KINDS, compared, curve_of
from .tables import percent

_MOST_NAMES = 4  # in a sentence


def listed(names: Sequence[str], thing: str | None = None) -> str:
    """The names, or only the number of these things if there are many."""
    if thing is not None and len(names) > _MOST_NAMES:
        return counted(len(names), thing)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# --- what the tests show ---------------------------------------------------------------------------------------------


_WORDS = {
    CANNOT_TELL: "no difference shown",
    DIVERGED: "every run diverged",
    None: "no test possible",
}


class Answer(NamedTuple):
    """The words of the verdicts on an arm compared with another, by data set."""

    arm: str
    reference: str
    words: Mapping[str, str | None]

    @property
    def has_difference(self) -> bool:
        return any(word in DIFFERENCES for word in self.words.values())

    @property
    def sentence(self) -> str:
        """The words, differences first, each with its data sets."""
        datasets: dict[str | None, list[str]] = {}
        for dataset, word in self.words.items():
            datasets.setdefault(word, []).append(dataset)
        ordered = sorted(datasets, key=[*DIFFERENCES, *_WORDS].index)
        parts = [f"{_WORDS.get(word, word)} {self._on(datasets[word])}" for word in ordered]
        return f"{self.arm} against {self.reference}: {'; '.join(parts)}."

    def _on(self, datasets: list[str]) -> str:
        count = len(self.words)
        if len(datasets) == count > 1:
            return f"on all {counted(count, 'data set')}" if count > 2 else "on both data sets"
        return "on " + (
            listed(datasets) if len(datasets) <= _MOST_NAMES else f"{len(datasets)} of {counted(count, 'data set')}"
        )


def answers(verdicts: Iterable[Verdict]) -> list[Answer]:
    """From the verdicts by one metric: every arm compared with the baseline, then with its controls."""
    found: dict[tuple[str, str], dict[str, str | None]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.arm, verdict.reference), {})[verdict.dataset] = verdict.word
    return [Answer(*names, words) for names, words in found.items()]


# --- limitations -----------------------------------------------------------------------------------------------------


def limitations(results: list[RunResult], summary: dict[str, Any]) -> list[str]:
    """A sentence for each limitation; empty if there is none."""
    study, num_seeds = summary["study"], len(summary["study"]["seeds"])
    found = []
    expected = len(study["arms"]) * len(study["datasets"]) * num_seeds
    if missing := expected - sum(result.stage == "compare" for result in results):
        found.append(f"The study is not finished: {missing} of {counted(expected, 'run')} have no result yet.")
    found += list(filter(None, [different_losses(results)]))
    found += _still_falling(compared(results))
    if num_seeds < FEW_SEEDS and len(study["arms"]) > 1:
        few = f"{counted(num_seeds, 'seed')} can only show large differences"
        only = "one seed shows no differences" if num_seeds == 1 else few
        found.append(f"There are few seeds: {only}. Give {FEW_SEEDS} or more.")
    return found + _never_began(results) + _changed_plugins(results) + _learning_rates(study, summary.get("tuning") or [])


def different_losses(results: list[RunResult]) -> str:
    """A sentence if arms have different objectives; empty if all have the same."""
    objectives = sorted({result.config["objective"] for result in compared(results) if "objective" in result.config})
    if len(objectives) < 2:
        return ""
    return f"Losses of {' and '.join(objectives)} are different quantities: compare their curves within an objective only."


def _never_began(results: list[RunResult]) -> list[str]:
    """Arms and data sets whose density of the timesteps, which waits for losses, did not begin in all runs."""
    waiting = [result for result in compared(results) if "timestep_density_began" in result.record["train"]]
    found = []
    for (arm, dataset), runs in by_cell(waiting).items():
        if late := [run for run in runs if run.record["train"]["timestep_density_began"] is None]:
            before = late[0].config["timestep_sampler_kwargs"]["before"]
            found.append(
                f"The density of the timesteps of {arm} on {dataset} never began in {len(late)} of "
                f"{counted(len(runs), 'run')}: what is compared there is the density before it, {before}."
            )
    return found


def _changed_plugins(results: list[RunResult]) -> list[str]:
    """The digest of a run does not cover the code of plug-ins."""
    hashes: dict[str, set[str]] = {}
    for result in results:
        for plugin in result.record.get("meta", {}).get("plugins", []):
            hashes.setdefault(Path(plugin["name"]).name, set()).add(plugin["sha256"])
    return [
        f"The code of {name} changed between runs, which are compared nevertheless. Run the study in a new folder."
        for name, found in hashes.items()
        if len(found) > 1
    ]


def _still_falling(runs: list[RunResult]) -> list[str]:
    """Arms and data sets on which the loss of at least half of the runs was still falling."""
    count, arms_on = 0, dict[str, list[str]]()
    for (arm, dataset), of_cell in by_cell(runs).items():
        falling = sum(map(_is_falling, of_cell))
        count += falling
        if falling and 2 * falling >= len(of_cell):
            arms_on.setdefault(dataset, []).append(arm)
    if not arms_on:
        return []
    where = [f"{listed(arms, 'arm')} on {dataset}" for dataset, arms in arms_on.items()]
    return [
        f"Runs are short: the loss of {count} of {counted(len(runs), 'run')} was still falling at the end "
        f"({listed(where, 'data set')}). Longer runs may lead to other answers."
    ]


def _is_falling(result: RunResult) -> bool:
    """By the held-out loss, or by the training loss where the former has too few points."""
    curves = (curve_of(result.curves, kind) for kind in CURVE_KINDS if kind.is_loss)
    held_out_first = [curve for curve in curves if curve is not None and has_end(curve[0])][::-1]
    return bool(held_out_first) and still_falling(*held_out_first[0])


LAST_PART = 0.2  # of the updates of a run
# Share of a curve's range. exp(-t / T) falls by 4 % in the last fifth of 3 T, and by 2 % in that of 4 T.
STILL_FALLING = 0.03
_FEWEST_POINTS = 3  # for a slope with a standard error


def has_end(updates: np.ndarray) -> bool:
    """Whether the last part of a curve has enough points to tell a fall from noise."""
    return len(updates) > 0 and int(_is_last(updates).sum()) >= _FEWEST_POINTS


def still_falling(updates: np.ndarray, values: np.ndarray) -> bool:
    """
    Whether a curve falls over its last part by more than `STILL_FALLING` of its range, and by more than its noise.

    Both arrays are `(num,)`, finite, and of a curve that [`has_end`]. The fall is that of the regression line through the
    last part, whose slope must be two standard errors below 0.
    """
    from scipy import stats

    last = _is_last(updates)
    line = stats.linregress(updates[last], values[last])
    fall = -line.slope * np.ptp(updates[last])
    return bool(line.slope < -2 * line.stderr and fall > STILL_FALLING * np.ptp(values))


def _is_last(updates: np.ndarray) -> np.ndarray:
    return updates >= (1 - LAST_PART) * updates[-1]


def _learning_rates(study: dict[str, Any], tuning: list[dict[str, Any]]) -> list[str]:
    """Learning rates that were not tuned, or whose best is at the edge of those tried."""
    if not tuning:
        fields = [{key: value for key, value in arm.items() if key not in ARM_NOTES} for arm in study["arms"].values()]
        without_rates = {repr(sorted({**arm, "learning_rate": None}.items())) for arm in fields}
        if len(fields) < 2 or len(without_rates) < len(fields):  # some arm is compared at several rates
            return []
        return [
            "Learning rates were not tuned: an arm that is worse at the given rate may be better at another. Give the study "
            "tune, or learning_rates."
        ]
    edges = [f"{row['arm']} on {row['dataset']}" for row in tuning if row["at_edge"]]
    if not edges:
        return []
    chosen = sum(row["chosen"] for row in tuning)
    return [
        f"{len(edges)} of {counted(chosen, 'chosen learning rate')} {agreeing(len(edges), 'is', 'are')} the lowest or the "
        f"highest of those tried ({listed(edges, 'choice')}): a rate beyond those may be better."
    ]


# --- strength of the evidence ----------------------------------------------------------------------------------------


def reach(summary: dict[str, Any], metric: str, verdicts: Iterable[Verdict]) -> list[str]:
    """Sentences on noise, power and data sets, by the primary metric; none where nothing was compared."""
    rows = [row for row in summary.get("power") or [] if row["metric"] == metric]
    num_seeds = max((row["seeds"] for row in rows), default=0)
    sentences = []
    if noise := _share_of(rows, "noise"):
        sentences.append(f"Noise: between seeds, the standard deviation is {noise} of the mean, depending on the arm.")
    if seen := _share_of(rows, "detectable"):
        sentences.append(
            f"Power: {counted(num_seeds, 'seed')} {agreeing(num_seeds, 'shows', 'show')} differences of {seen} with a "
            "probability of 80 %, depending on arm and data set; smaller ones may be missed."
        )
    tested = [answer for answer in answers(verdicts) if any(answer.words.values())]
    datasets = summary["study"]["datasets"]
    if tested and len(datasets) == 1:
        sentences.append(f"Data sets: one, {datasets[0]}. Whether the answers hold on others was not tested.")
    elif tested:
        same = sum(len({*answer.words.values()}) == 1 for answer in tested)
        sentences.append(f"Data sets: the verdict is the same on all for {same} of {counted(len(tested), 'comparison')}.")
    return sentences


def _share_of(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    """The range of a share over rows of the summary's power, such as "1.8 to 6.8 %"; empty if none is known."""
    found = [row[f"{name}_{end}"] for row in rows for end in ("low", "high") if row[f"{name}_{end}"] is not None]
    low, high = (percent(value) for value in (min(found), max(found))) if found else ("", "")
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
