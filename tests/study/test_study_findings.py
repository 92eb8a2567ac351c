"""Verdicts on differences and speed-ups."""

import numpy as np
from tables import cases
from values_of_studies import by_seed, noisy_curves

from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.study.analysis.speedups import speedups
from diffusers_lrlab.study.analysis.statistics import compare
from diffusers_lrlab.study.analysis.summary import findings

FIGURES, BASELINE = [0.33, 0.35, 0.34, 0.36, 0.32], [0.40, 0.42, 0.42, 0.41, 0.40]


def verdict_of(figures, baseline, metric="kl", diverged=0):
    """The verdict on "cosine" beside "constant" on dino."""
    values = {"cosine": {"dino": by_seed(*figures)}, "constant": {"dino": by_seed(*baseline)}}
    rows = [{**row, "diverged": diverged} for row in compare(values, "constant", metric)]
    (verdict,) = findings(rows, "constant")
    row = next(row for row in rows if row["arm"] == "cosine")
    assert (verdict.arm, verdict.reference, verdict.dataset, verdict.metric) == ("cosine", "constant", "dino", metric)
    figures = verdict.difference, verdict.low, verdict.high, verdict.p
    assert figures == tuple(row[name] for name in ("diff", "diff_low", "diff_high", "p_adjusted"))
    return verdict


@cases(
    ("figures", "baseline", "diverged", "word"),
    [
        (FIGURES, BASELINE, 0, "better"),
        (BASELINE, FIGURES, 0, "worse"),
        ([None, *FIGURES], [0.9, *BASELINE], 1, "better"),
        ([1.0, 1.2, 0.9], [1.1, 1.0, 1.0], 0, "cannot tell"),
        ([1, 2, 3], [1, 2, 3], 0, "cannot tell"),
        ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 0, "cannot tell"),  # a sign test of five
        ([2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], 0, "worse"),
        ([1.0], [1.5], 0, None),
        ([1.5, None], [None, 1.5], 0, None),
        ([None, None], [1.5, 1.4], 2, "diverged"),
        ([None, None], [1.5, 1.4], 0, None),
    ],
)
def test_words(figures, baseline, diverged, word):
    verdict = verdict_of(figures, baseline, diverged=diverged)
    assert verdict.word == word
    assert verdict.is_difference is (word in ("better", "worse"))


@cases("name", [name for name, metric in METRICS.items() if metric.better != "neither"])
def test_better_follows_the_direction_of_the_metric(name):
    assert verdict_of(FIGURES, BASELINE, name).word == ("worse" if METRICS[name].better == "larger" else "better")


@cases(
    ("figures", "word"),
    [
        ((5, 0, 1.8, 0.003), "faster"),
        ((5, 2, 0.8, 0.003), "slower"),
        ((5, 1, 1.8, 1.0), "cannot tell"),
        ((1, 0, 1.1, None), None),
        ((1, 1, 1.1, None), "never as good"),
        ((0, 0, None, None), None),
    ],
)
def test_words_of_speed(figures, word):
    row = dict(zip(("n", "censored", "speedup", "p_adjusted"), figures, strict=True))
    row |= {"arm": "a", "dataset": "dino", "ci_low": 0.5, "ci_high": 2.5}
    (verdict,) = findings([row, {"arm": "b", "dataset": "dino"}], "b")
    assert (verdict.metric, verdict.word, verdict.is_difference) == ("speedup", word, word not in ("cannot tell", None))
    assert (verdict.difference, verdict.low, verdict.high, verdict.p) == (figures[2], 0.5, 2.5, figures[3])


def test_verdicts_on_speed_come_from_rows():
    curves = noisy_curves(np.random.default_rng(0), {"fast": 2.0, "base": 1.0, "slow": 0.5}, 5, 1e-3)
    assert [verdict.word for verdict in findings(speedups(curves, "base"), "base")] == ["faster", "never as good"]
