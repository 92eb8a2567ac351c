"""What a report begins with: one sentence for each question, and warnings about what the study cannot say."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...core.words import counted
from ...evaluation.metrics import better_of
from ..analysis.falling import has_end, still_falling
from ..analysis.verdicts import CANNOT_TELL, DIFFERENCES, DIVERGED, NEVER, Verdict
from ..runs.results import RunResult
from ..spec.spec import ARM_NOTES
from .report_data import FAMILIES, compared, curve_of
from .table_formats import NONE, Table

MOST_SENTENCES = 10
FEW_SEEDS = 5  # a paired test of fewer sees little but large differences
_MOST_NAMES = 4


class Answer(NamedTuple):
    """What the tests say of an arm beside another, by data set."""

    arm: str
    reference: str
    words: Mapping[str, str | None]

    @property
    def differences(self) -> list[str]:
        """Those that a test shows, such as "better"."""
        return [word for word in DIFFERENCES if word in self.words.values()]

    @property
    def sentence(self) -> str:
        places: dict[str | None, list[str]] = {}
        for dataset, word in self.words.items():
            places.setdefault(word, []).append(dataset)
        parts = []
        if self.differences:
            than = [f" than {self.reference}", *[""] * len(self.differences)]
            said = [f"{word}{than[place]} {self._on(places[word])}" for place, word in enumerate(self.differences)]
            parts = [f"{self.arm} is {', and '.join(said)}"]
        rest = {
            CANNOT_TELL: f"the test shows no difference between {self.arm} and {self.reference}",
            NEVER: f"{self.arm} never got as good as {self.reference} ends",
            DIVERGED: f"every run of {self.arm} diverged",
            None: f"no test of {self.arm} beside {self.reference} was possible",
        }
        for outcome, clause in rest.items():
            if outcome in places:
                begins = clause if parts or outcome == NEVER else clause[0].upper() + clause[1:]  # names stay as they are
                parts.append(f"{begins} {self._on(places[outcome])}")
        return "; ".join(parts) + "."

    def _on(self, datasets: list[str]) -> str:
        count = len(self.words)
        if len(datasets) == count > 1:
            return f"on all {counted(count, 'data set')}" if count > 2 else "on both data sets"
        if len(datasets) > _MOST_NAMES:
            return f"on {len(datasets)} of {counted(count, 'data set')}"
        return "on " + _named(datasets)


def _named(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _short(names: Sequence[str], thing: str) -> str:
    """All of them, or how many there are."""
    return _named(names) if len(names) <= _MOST_NAMES else counted(len(names), thing)


def answers(verdicts: Iterable[Verdict]) -> list[Answer]:
    """Of the verdicts by one metric: every arm beside the baseline, then beside its controls."""
    found: dict[tuple[str, str], dict[str, str | None]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.arm, verdict.reference), {})[verdict.dataset] = verdict.word
    return [Answer(*names, words) for names, words in found.items()]


def answer_table(some: Iterable[Answer], datasets: list[str]) -> Table:
    """Answers that are too many for sentences."""
    rows = [[answer.arm, answer.reference, *(answer.words.get(name) or NONE for name in datasets)] for answer in some]
    return Table("answers", "What the tests say of each arm", ["arm", "beside", *datasets], rows, labels=2 + len(datasets))


def meaning(metric: str, baseline: str) -> str:
    """How to read the figures of a metric, and differences between them."""
    better = better_of(metric)
    if better == "neither":
        return f"Neither smaller nor larger is better. Differences are to {baseline}."
    other = "larger" if better == "smaller" else "smaller"
    side, wrong = ("below", "above") if better == "smaller" else ("above", "below")
    return (
        f"{better.capitalize()} is better, {other} is worse: a difference {side} 0 speaks for an arm, one {wrong} 0 for "
        f"{baseline}, with which it is compared."
    )


def warnings(results: list[RunResult], summary: dict[str, Any]) -> list[str]:
    """What a reader must know before relying on the answers; empty if there is nothing."""
    study, num_seeds = summary["study"], len(summary["study"]["seeds"])
    found = []
    expected = len(study["arms"]) * len(study["datasets"]) * num_seeds
    if missing := expected - sum(result.stage == "compare" for result in results):
        found.append(f"The study is not finished: {counted(missing, 'run')} of {expected} have no result yet.")
    found += _falling(compared(results))
    if num_seeds < FEW_SEEDS and len(study["arms"]) > 1:
        found.append(
            f"There are few seeds: {num_seeds}. So few show large differences only, and where the test shows none, there "
            f"may well be one. Give {FEW_SEEDS} or more."
        )
    return found + _changed_plugins(results) + _rates(study, summary.get("tuning") or [])


def _changed_plugins(results: list[RunResult]) -> list[str]:
    """A run's name does not say with which version of a plug-in it was made."""
    hashes: dict[str, set[str]] = {}
    for result in results:
        for plugin in result.record.get("meta", {}).get("plugins", []):
            hashes.setdefault(Path(plugin["name"]).name, set()).add(plugin["sha256"])
    changed = [name for name, found in hashes.items() if len(found) > 1]
    return [
        f"The code of {name} changed between runs, which are compared as if it had not. Run the study in a new folder."
        for name in changed
    ]


def _falling(runs: list[RunResult]) -> list[str]:
    """Where at least half of an arm's runs on a data set were still learning."""
    runs_of = Counter((result.arm, result.dataset) for result in runs)
    falling = Counter((result.arm, result.dataset) for result in runs if _is_falling(result))
    places = [place for place, count in falling.items() if 2 * count >= runs_of[place]]
    if not places:
        return []
    arms_on: dict[str, list[str]] = {}
    for arm, dataset in places:
        arms_on.setdefault(dataset, []).append(arm)
    where = [f"{_short(arms, 'arm')} on {dataset}" for dataset, arms in arms_on.items()]
    return [
        f"Runs are short: the loss of {falling.total()} of {counted(len(runs), 'run')} was still falling at the end "
        f"({_short(where, 'data set')}). Longer runs may lead to other answers."
    ]


def _is_falling(result: RunResult) -> bool:
    """By the held-out loss, or by the training loss where the former has too few points."""
    curves = (curve_of(result.curves, family) for family in FAMILIES if family.is_loss)
    held_out_first = [curve for curve in curves if curve is not None and has_end(curve[0])][::-1]
    return bool(held_out_first) and still_falling(*held_out_first[0])


def _rates(study: dict[str, Any], tuning: list[dict[str, Any]]) -> list[str]:
    """Learning rates that nobody chose, or that were chosen at the edge of those tried."""
    fields = [{key: value for key, value in arm.items() if key not in ARM_NOTES} for arm in study["arms"].values()]
    without_rates = {repr(sorted({**arm, "learning_rate": None}.items())) for arm in fields}
    if not tuning:
        if len(fields) < 2 or len(without_rates) < len(fields):  # some arm is compared at several rates
            return []
        return [
            "Learning rates were not tuned: each arm ran at the rate it was given, and one that is worse here may be better "
            "at another. Give the study tune, or learning_rates."
        ]
    edges = [f"{row['arm']} on {row['dataset']}" for row in tuning if row["at_edge"]]
    if not edges:
        return []
    where = _short(edges, "choice")
    chosen = sum(row["chosen"] for row in tuning)
    return [
        f"{len(edges)} of {chosen} learning rates are not known to be the best: the lowest or the highest of those tried "
        f"({where}), so a better one may lie outside."
    ]
