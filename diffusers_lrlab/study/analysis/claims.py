"""Judges the claims of a study by its tests and intervals: on each data set, and over all of them."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ...core.words import counted
from ...evaluation.metrics import better_of, metric_label
from ..spec.claims import NO_DIFFERENCE, NO_WORSE, WORSE, link_of
from ..spec.horizons import source_of
from ..spec.spec import CONSISTENCY, SPEEDUP, Claim
from .figures import NONE, percent, percent_range, probability, times, times_range
from .power import detectable, num_tests, share
from .statistics import FEW_SEEDS
from .verdicts import CANNOT_TELL, DIVERGED, NEVER, Row, speed_word_of, word_of

# On a data set.
AS_CLAIMED, SMALLER, TOO_SMALL, OPPOSITE = "as claimed", "smaller than claimed", "below the claimed size", "the opposite"
# Over all data sets.
SUPPORTED, ON_ONE, IN_PART = "supported", "supported, one set", "supported in part"
MIXED, NOT_SUPPORTED = "mixed by data", "not supported"
VERDICTS = {
    SUPPORTED: "as claimed on every data set, of two or more",
    ON_ONE: "as claimed on the one data set that was tested, perhaps at several lengths",
    IN_PART: "as claimed on some data sets; on the others, the study cannot tell",
    MIXED: "as claimed on some data sets; on others the opposite, or an effect below the claimed size",
    SMALLER: "in the claimed direction on some data sets, but on none as large as claimed",
    NOT_SUPPORTED: "as claimed on none; the opposite on some, or below the claimed size on all",
    CANNOT_TELL: "none of the above",
}
_SIGNS = {"better": 1, "faster": 1, "worse": -1, "slower": -1, NEVER: -1, DIVERGED: -1}


@dataclass(frozen=True)
class Outcome:
    """
    A claim on one data set.

    `effect`, `low` and `high` are the difference and its 95 % interval as shares of the other arm's mean, and `detectable`
    is the smallest one that the test shows with a probability of 80 %. For speed-ups, all are factors; for consistency,
    `effect` is the ratio of distances.
    """

    dataset: str
    word: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None  # adjusted
    pairs: int = 0
    detectable: float | None = None
    is_bound: bool = False  # whether the effect is an upper bound of a speed-up


def judge_claims(claims: tuple[Claim, ...], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """
    A row for each claim: what it says, the outcome on each data set, and the verdict over all of them by `VERDICTS`.

    `summary` may be of any study that has the arms, and of any version of the package.
    """
    return [_judge(claim, summary) for claim in claims]


def _judge(claim: Claim, summary: dict[str, Any]) -> dict[str, Any]:
    outcome = {SPEEDUP: _of_speed, CONSISTENCY: _of_consistency}.get(claim.metric, _of_metric)
    outcomes = [outcome(claim, dataset, summary) for dataset in summary["study"]["datasets"]]
    return {
        **asdict(claim),
        "link": link_of(claim.source),
        "expected": expected(claim),
        "label": label_of(claim),
        "verdict": verdict_of([each.word for each in outcomes], is_one=len(sources_of(summary["study"])) == 1),
        "held_on": [each.dataset for each in outcomes if each.word == AS_CLAIMED],
        "datasets": [asdict(each) | texts_of(each, claim.metric) for each in outcomes],
        "seeds": max((each.pairs for each in outcomes), default=0),
        "limits": limits_of(claim, outcomes, summary),
    }


def sources_of(study: dict[str, Any]) -> list[str]:
    """The data sets of a study, without its horizons."""
    names = study["datasets"]
    return list(dict.fromkeys(map(source_of, names))) if study.get("horizons") else list(names)


def limits_of(claim: Claim, outcomes: list[Outcome], summary: dict[str, Any]) -> list[str]:
    """Reasons that weaken a verdict."""
    tuning, names = summary.get("tuning") or [], (claim.arm, claim.against)
    seeds = len(summary["study"]["seeds"])
    edges = [f"{row['arm']} on {row['dataset']}" for row in tuning if row["at_edge"] and row["arm"] in names]
    found = {
        "one data set": len(sources_of(summary["study"])) == 1,
        counted(seeds, "seed"): seeds < FEW_SEEDS,
        "no test": claim.metric == CONSISTENCY,
        "learning rates not tuned": not tuning,
        f"learning rate at the edge of those tried: {', '.join(edges)}": bool(edges),
        "bounds without an interval": any(each.is_bound for each in outcomes),
    }
    return [limit for limit, holds in found.items() if holds]


def verdict_of(words: list[str], is_one: bool = False) -> str:
    """The verdict over all data sets, or over one at several lengths; `VERDICTS` has the rule of each."""
    found = {*words}
    if found == {AS_CLAIMED}:
        return ON_ONE if is_one else SUPPORTED
    if AS_CLAIMED in found:
        return IN_PART if found <= {AS_CLAIMED, CANNOT_TELL} else MIXED
    if OPPOSITE in found or found == {TOO_SMALL}:
        return NOT_SUPPORTED
    return SMALLER if SMALLER in found else CANNOT_TELL


def expected(claim: Claim) -> str:
    """What the claim expects of the arm, in words."""
    if claim.metric == SPEEDUP:
        return f"at least {claim.by:g} times as fast" if claim.by else "faster"
    if claim.by:
        return f"{claim.expects} by {100 * claim.by:g} % or more"
    return f"{claim.expects} within {100 * claim.within:g} %" if claim.within else claim.expects


def texts_of(outcome: Outcome, metric: str) -> dict[str, str]:
    """The effect with its interval, the detectable one and the adjusted p, as text."""
    detectable = outcome.detectable
    shown = NONE if detectable is None else times(detectable) if metric == SPEEDUP else percent(detectable)
    return {"text": _effect(outcome, metric), "detectable_text": shown, "p_text": probability(outcome.p)}


def _effect(outcome: Outcome, metric: str) -> str:
    low, high = outcome.low, outcome.high
    if outcome.effect is None:
        return NONE
    if metric == SPEEDUP:
        shown = f"{'≤ ' * outcome.is_bound}{times(outcome.effect)}"
        return shown if low is None or high is None else f"{shown} ({times_range(low, high)})"
    if metric == CONSISTENCY:
        return percent(outcome.effect)
    if low is None or high is None:
        return percent(outcome.effect, signed=True)
    return f"{percent(outcome.effect, high - low, signed=True)} ({percent_range(low, high)})"


def label_of(claim: Claim) -> str:
    if claim.metric == SPEEDUP:
        return "Speed-up to an equal loss"
    if claim.metric == CONSISTENCY:
        return "Distance of samples from the same noise, as a share of that of samples from unrelated noise"
    return f"{metric_label(claim.metric)} ({better_of(claim.metric)} is better)"


def _find(rows: list[Row], baseline: str, arm: str, against: str, dataset: str) -> Row | None:
    for row in rows:
        if (row["arm"], row.get("control", baseline), row["dataset"]) == (arm, against, dataset):
            return row
    return None


def _tested(claim: Claim, metric: str, summary: dict[str, Any]) -> list[list[Row]]:
    """The families of tests that may compare the two arms: with the baseline, and with controls."""
    own = summary.get("speedups") or [] if metric == SPEEDUP else [row for row in summary["rows"] if row["metric"] == metric]
    return [own, (summary.get("controls") or {}).get(metric, [])]


def _of_metric(claim: Claim, dataset: str, summary: dict[str, Any]) -> Outcome:
    baseline, rows = summary["study"]["baseline"], [row for row in summary["rows"] if row["metric"] == claim.metric]
    other = next((row for row in rows if (row["arm"], row["dataset"]) == (claim.against, dataset)), None)
    for family in _tested(claim, claim.metric, summary):
        for sign, pair in ((1, (claim.arm, claim.against)), (-1, (claim.against, claim.arm))):
            row = _find(family, baseline, *pair, dataset)
            if row is not None and other is not None and pair[0] != baseline:
                return _outcome(claim, row, sign, other["mean"], num_tests(family))
    return Outcome(dataset, CANNOT_TELL)


def _outcome(claim: Claim, row: Row, sign: int, mean: float | None, tests: int) -> Outcome:
    """`sign` is -1 for the row of a pair in the other order, and `mean` that of the arm that the claim compares with."""
    ends = [row["diff_low"], row["diff_high"]]
    if ends[0] is None and row["p"] is not None:  # all differences are equal
        ends = [row["diff"], row["diff"]]
    spread = detectable(row["diff_low"], row["diff_high"], row["pairs"], tests)
    effect, first, last = (share(None if value is None else sign * value, mean) for value in (row["diff"], *ends))
    low, high = (first, last) if sign > 0 else (last, first)
    shown = sign * _SIGNS.get(word_of(row) or "", 0)
    word = _word(claim, low, high, shown)
    return Outcome(row["dataset"], word, effect, low, high, row["p_adjusted"], row["pairs"], share(spread, mean))


def _word(claim: Claim, low: float | None, high: float | None, shown: int) -> str:
    """The outcome from the interval of the relative difference and the test, whose `shown` is 1 for better, -1 for worse."""
    gains = None if low is None or high is None else (-high, -low) if better_of(claim.metric) == "smaller" else (low, high)
    if claim.expects in (NO_WORSE, NO_DIFFERENCE):
        return _word_within(claim, gains, shown)
    if claim.expects == WORSE:
        shown, gains = -shown, None if gains is None else (-gains[1], -gains[0])
    if shown < 0:
        return OPPOSITE
    is_too_small = claim.by is not None and gains is not None and gains[1] < claim.by
    if shown > 0:
        return SMALLER if is_too_small else AS_CLAIMED
    return TOO_SMALL if is_too_small else CANNOT_TELL


def _word_within(claim: Claim, gains: tuple[float, float] | None, shown: int) -> str:
    """For a margin: inside it by the interval, or different by the adjusted test."""
    assert claim.within is not None
    if gains is not None and gains[0] >= -claim.within and (claim.expects == NO_WORSE or gains[1] <= claim.within):
        return AS_CLAIMED
    differs = shown < 0 or (claim.expects == NO_DIFFERENCE and shown > 0)
    return OPPOSITE if differs else CANNOT_TELL


def _of_speed(claim: Claim, dataset: str, summary: dict[str, Any]) -> Outcome:
    for family in _tested(claim, SPEEDUP, summary):
        row = _find(family, summary["study"]["baseline"], claim.arm, claim.against, dataset)
        if row is None:
            continue
        low, high, factor = row["ci_low"], row["ci_high"], row["speedup"]
        shown = _SIGNS.get(speed_word_of(row) or "", 0)
        bound = high if high is not None else factor if row["censored"] else None
        if shown < 0:
            word = OPPOSITE
        elif claim.by is not None and bound is not None and bound < claim.by:
            word = SMALLER if shown else TOO_SMALL
        else:
            word = AS_CLAIMED if shown else CANNOT_TELL
        seen = None
        if low is not None and high is not None:
            seen = detectable(math.log(low), math.log(high), row["n"], num_tests(family))
        figures = factor, low, high, row["p_adjusted"], row["n"], seen if seen is None else math.exp(seen)
        return Outcome(dataset, word, *figures, is_bound=bool(row["censored"]))
    return Outcome(dataset, CANNOT_TELL)


def _of_consistency(claim: Claim, dataset: str, summary: dict[str, Any]) -> Outcome:
    """No test: the ratio of distances against the margin."""
    one, other = sorted((claim.arm, claim.against))
    between = {f"seeds of {one}"} if one == other else {f"{one} and {other}, by seed", f"{other} and {one}, by seed"}
    for row in summary.get("consistency") or []:
        if row["dataset"] == dataset and row["between"] in between:
            assert claim.within is not None
            word = AS_CLAIMED if row["ratio"] <= claim.within else OPPOSITE
            return Outcome(dataset, word, row["ratio"], pairs=row["pairs"])
    return Outcome(dataset, CANNOT_TELL)
