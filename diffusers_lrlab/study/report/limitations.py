"""Limitations of a study: missing or short runs, few seeds, densities that never began, changed plug-ins, untuned rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.words import agreeing, counted
from ..analysis.falling import has_end, still_falling
from ..analysis.statistics import FEW_SEEDS
from ..runs.results import RunResult, by_cell
from ..spec.spec import ARM_NOTES
from .answers import MOST_NAMES, listed
from .curves import CURVE_KINDS, compared, curve_of


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


def _short(names: Sequence[str], thing: str) -> str:
    """The names, or only their number if there are many."""
    return listed(names) if len(names) <= MOST_NAMES else counted(len(names), thing)


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
    where = [f"{_short(arms, 'arm')} on {dataset}" for dataset, arms in arms_on.items()]
    return [
        f"Runs are short: the loss of {count} of {counted(len(runs), 'run')} was still falling at the end "
        f"({_short(where, 'data set')}). Longer runs may lead to other answers."
    ]


def _is_falling(result: RunResult) -> bool:
    """By the held-out loss, or by the training loss where the former has too few points."""
    curves = (curve_of(result.curves, kind) for kind in CURVE_KINDS if kind.is_loss)
    held_out_first = [curve for curve in curves if curve is not None and has_end(curve[0])][::-1]
    return bool(held_out_first) and still_falling(*held_out_first[0])


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
        f"highest of those tried ({_short(edges, 'choice')}): a rate beyond those may be better."
    ]
