"""The answers that a report begins with: for each arm and metric, one sentence on all data sets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from ...core.words import counted
from ...evaluation.metrics import better_of
from ..analysis.figures import NONE
from ..analysis.verdicts import CANNOT_TELL, DIFFERENCES, DIVERGED, NEVER, Verdict
from .formats import Table

MOST_SENTENCES = 10
MOST_NAMES = 4  # in a sentence


class Answer(NamedTuple):
    """The words of the verdicts on an arm compared with another, by data set."""

    arm: str
    reference: str
    words: Mapping[str, str | None]

    @property
    def differences(self) -> list[str]:
        """The differences that a test shows, such as "better"."""
        return [word for word in DIFFERENCES if word in self.words.values()]

    @property
    def sentence(self) -> str:
        datasets: dict[str | None, list[str]] = {}
        for dataset, word in self.words.items():
            datasets.setdefault(word, []).append(dataset)
        parts = []
        if self.differences:
            than = [f" than {self.reference}", *[""] * len(self.differences)]
            clauses = [f"{word}{than[index]} {self._on(datasets[word])}" for index, word in enumerate(self.differences)]
            parts = [f"{self.arm} is {', and '.join(clauses)}"]
        rest = {
            CANNOT_TELL: f"the test shows no difference between {self.arm} and {self.reference}",
            NEVER: f"{self.arm} never reached the final quality of {self.reference}",
            DIVERGED: f"every run of {self.arm} diverged",
            None: f"no test of {self.arm} against {self.reference} was possible",
        }
        for word, clause in rest.items():
            if word in datasets:
                start = clause if parts or word == NEVER else clause[0].upper() + clause[1:]  # the case of names is kept
                parts.append(f"{start} {self._on(datasets[word])}")
        return "; ".join(parts) + "."

    def _on(self, datasets: list[str]) -> str:
        count = len(self.words)
        if len(datasets) == count > 1:
            return f"on all {counted(count, 'data set')}" if count > 2 else "on both data sets"
        if len(datasets) > MOST_NAMES:
            return f"on {len(datasets)} of {counted(count, 'data set')}"
        return "on " + listed(datasets)


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def answers(verdicts: Iterable[Verdict]) -> list[Answer]:
    """From the verdicts by one metric: every arm compared with the baseline, then with its controls."""
    found: dict[tuple[str, str], dict[str, str | None]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.arm, verdict.reference), {})[verdict.dataset] = verdict.word
    return [Answer(*names, words) for names, words in found.items()]


def answer_table(some: Iterable[Answer], datasets: list[str]) -> Table:
    """A table of more answers than can be read as sentences."""
    rows = [[answer.arm, answer.reference, *(answer.words.get(name) or NONE for name in datasets)] for answer in some]
    frame = pd.DataFrame(rows, columns=["arm", "compared with", *datasets])
    return Table("answers", "Verdicts on all arms", frame, num_labels=2 + len(datasets))


def meaning(metric: str, baseline: str) -> str:
    """How to read a metric, and differences in it."""
    better = better_of(metric)
    if better == "neither":
        return f"Neither smaller nor larger is better. Differences are from {baseline}."
    worse_side = "above" if better == "smaller" else "below"
    return f"{better.capitalize()} is better. Differences are from {baseline}; {worse_side} 0, the arm is worse."
