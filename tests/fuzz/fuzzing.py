"""Searches for inputs that end otherwise than they should, and repeats those that did."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from fuzz.targets import TARGETS, Hang, check

CORPUS = Path(__file__).with_name("corpus.jsonl")


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    accepted: int = 0
    slowest: float = 0.0  # seconds
    failures: dict[str, object] = field(default_factory=dict)  # from what went wrong to the smallest input


def corpus():
    """Pairs of a kind and an input that once failed."""
    return [(case["kind"], case["input"]) for case in map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())]


def search(kind, count, seed, tally=None):
    """Tries so many inputs of a kind; the smallest that fails is in `tally.failures`."""
    tally = tally or Tally()
    last = []
    quiet = {"print_blob": False, "verbosity": hypothesis.Verbosity.quiet, "report_multiple_bugs": False}
    unlimited = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, **quiet, **unlimited)
    @hypothesis.given(TARGETS[kind][0])
    def each(given):
        tally.cases += 1
        started = time.monotonic()
        try:
            tally.accepted += check(kind, given)
        except BaseException as error:
            last[:] = [given]
            if isinstance(error, Hang):  # hypothesis lets it through
                raise TimeoutError(str(error)) from None
            raise
        finally:
            tally.slowest = max(tally.slowest, time.monotonic() - started)

    try:
        each()
    except Exception as error:
        if not last:
            raise  # it is the input that cannot be made
        tally.failures.setdefault(f"{type(error).__name__}: {error}"[:300], last[0])
    return tally
