"""Sentences about differences and speed-ups."""

import numpy as np
from tables import rows
from values_of_studies import by_seed, noisy_curves

from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.study.analysis.findings import findings, number, p_value, signed, speedup_findings
from diffusers_lrlab.study.analysis.speedups import speedups
from diffusers_lrlab.study.analysis.statistics import (
    compare,
)

LARGER_IS_BETTER = [name for name, metric in METRICS.items() if metric.better == "larger"]


# --- Sentences ----------------------------------------------------------------------------------------------------------

FIGURES, BASELINE = [0.33, 0.35, 0.34, 0.36, 0.32], [0.40, 0.42, 0.42, 0.41, 0.40]


def sentence(figures, baseline, metric="kl", **counts):
    """The sentence about "cosine" beside "constant" on dino; `counts` of runs that diverged by arm."""
    values = {"cosine": {"dino": by_seed(*figures)}, "constant": {"dino": by_seed(*baseline)}}
    rows = [{**row, "diverged": counts.get(row["arm"], 0)} for row in compare(values, "constant", metric)]
    (verdict,) = findings(rows, metric, "constant")
    return verdict.sentence


@rows(
    ("figures", "baseline", "counts", "text"),
    [
        (
            FIGURES, BASELINE, {},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.41 (difference -0.07, 95 % interval -0.0852 to "
            "-0.0548, adjusted p = 0.00022, 5 seeds).",
        ),
        (
            BASELINE, FIGURES, {},
            "cosine is worse than constant on dino in kl: 0.41 instead of 0.34 (difference +0.07, 95 % interval +0.0548 to "
            "+0.0852, adjusted p = 0.00022, 5 seeds).",
        ),
        (
            [1.0, 1.2, 0.9], [1.1, 1.0, 1.0], {},
            "cosine does not differ significantly from constant on dino (difference 0, 95 % interval -0.43 to +0.43, "
            "adjusted p = 1, 3 seeds); about 25 seeds would show a difference of 10 %.",
        ),
        (
            [1.0], [1.5], {},
            "cosine and constant share only one seed on dino (difference -0.5): a test needs two.",
        ),
        (
            [None, None], [1.5, 1.4], {"cosine": 2},
            "cosine has no kl on dino, so cosine cannot be compared with constant there. 2 of 2 runs of cosine diverged.",
        ),
        (
            [1.5, 1.4], [None, None], {"constant": 1},
            "constant has no kl on dino, so cosine cannot be compared with constant there. 1 of 1 run of constant diverged.",
        ),
        (
            [1.5, None], [None, 1.5], {},
            "cosine and constant share no seed on dino, so they cannot be compared there.",
        ),
        ([1, 2, 3], [1, 2, 3], {}, "cosine and constant have the same kl on dino with all 3 seeds."),
        ([1, 2], [1, 2], {}, "cosine and constant have the same kl on dino with both seeds."),
        (
            [2, 3, 4, 5, 6], [1, 2, 3, 4, 5], {},
            "cosine does not differ significantly from constant on dino (difference +1, the same each time, adjusted "
            "p = 0.062, 5 seeds).",
        ),
        (
            [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6], {},
            "cosine is worse than constant on dino in kl: 4.5 instead of 3.5 (difference +1, the same each time, adjusted "
            "p = 0.031, 6 seeds).",
        ),
        (
            [None, *FIGURES], [0.9, *BASELINE], {"cosine": 1},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.492 (difference over shared seeds -0.07, 95 % "
            "interval -0.0852 to -0.0548, adjusted p = 0.00022, 5 seeds). 1 of 6 runs of cosine diverged.",
        ),
        (
            FIGURES, BASELINE, {"cosine": 2, "constant": 1},
            "cosine is better than constant on dino in kl: 0.34 instead of 0.41 (difference -0.07, 95 % interval -0.0852 to "
            "-0.0548, adjusted p = 0.00022, 5 seeds). 2 of 7 runs of cosine diverged. 1 of 6 runs of constant diverged.",
        ),
    ],
)  # fmt: skip
def test_sentences(figures, baseline, counts, text):
    assert sentence(figures, baseline, **counts) == text


@rows("metric", ["kl", "energy_distance", "validation_loss", *LARGER_IS_BETTER])
def test_better_follows_the_direction_of_the_metric(metric):
    word = "worse" if metric in LARGER_IS_BETTER else "better"
    assert sentence(FIGURES, BASELINE, metric).startswith(f"cosine is {word} than constant on dino in {metric}: 0.34")


def test_sentences_are_about_one_metric_and_may_call_it_by_another_name():
    values = {"cosine": {"dino": by_seed(*FIGURES)}, "constant": {"dino": by_seed(*BASELINE)}}
    rows = compare(values, "constant", "kl") + compare(values, "constant", "coverage")
    assert len(findings(rows, "kl", "constant")) == len(findings(rows, "coverage", "constant")) == 1
    assert "dino in KL divergence: 0.34" in findings(rows, "kl", "constant", label="KL divergence")[0].sentence


@rows(
    ("needed", "hint"),
    [
        ({"1": 100, "5": 50, "10": 20}, "; about 20 seeds would show a difference of 10 %"),
        (
            {"1": 100, "5": 50, "10": 5},
            "; a difference of 10 % would probably have been seen in a single test, about 50 seeds would show one of 5 %",
        ),
        ({"1": 5, "5": 3, "10": 3}, "; a difference of 1 % would probably have been seen in a single test"),
        ({"1": None, "5": None, "10": None}, ""),
    ],
)
def test_what_so_many_seeds_could_see(needed, hint):
    """What is asked for is more than there is, or it is said that there was enough."""
    row = {"arm": "a", "dataset": "dino", "metric": "kl", "n": 5, "pairs": 5, "mean": 1.0, "diff": 0.1, "diff_low": -0.1}
    row |= {"diff_high": 0.3, "p": 0.3, "p_adjusted": 0.6, "seeds_needed": needed}
    baseline = {**row, "arm": "b"}
    (verdict,) = findings([row, baseline], "kl", "b")
    sentence = verdict.sentence
    assert sentence.endswith(f"(difference +0.1, 95 % interval -0.1 to +0.3, adjusted p = 0.6, 5 seeds){hint}.")


@rows(
    ("p", "text"),
    [(0.0499999, "p = 0.0499999"), (0.05, "p = 0.05"), (0.0496, "p = 0.0496"), (0.049, "p = 0.049"), (0, "p < 0.0001")]
    + [(0.003, "p = 0.003"), (1, "p = 1"), (0.99e-4, "p < 0.0001"), (1e-4, "p = 0.0001"), (0.000123, "p = 0.00012")],
)
def test_p_values_in_words(p, text):
    assert p_value(p) == text


def test_numbers_in_words():
    assert [number(x) for x in (0.34, 1 / 3, 12345.0, 0)] == ["0.34", "0.333", "1.23e+04", "0"]
    assert [signed(x) for x in (0.07, -0.07, 0)] == ["+0.07", "-0.07", "0"]


# --- Sentences about speed ----------------------------------------------------------------------------------------------


@rows(
    ("figures", "text"),
    [
        (
            (5, 0, 1.8, 1.5, 2.1, 0.003),
            "a is faster than b to its final quality on dino (1.8 times as fast, 95 % interval 1.5 to 2.1, adjusted "
            "p = 0.003, 5 seeds).",
        ),
        (
            (5, 2, 0.8, 0.7, 0.9, 0.003),
            "a is slower than b to its final quality on dino (at most 0.8 times as fast, 95 % interval 0.7 to 0.9, adjusted "
            "p = 0.003, 5 seeds). 2 of 5 runs of a never got there.",
        ),
        (
            (5, 1, 1.8, 1.5, 2.1, 1.0),
            "a is not significantly faster or slower than b to its final quality on dino (at most 1.8 times as fast, 95 % "
            "interval 1.5 to 2.1, adjusted p = 1, 5 seeds). 1 of 5 runs of a never got there.",
        ),
        (
            (5, 0, 0.9, 0.7, 1.3, 0.2),
            "a is not significantly faster or slower than b to its final quality on dino (0.9 times as fast, 95 % interval "
            "0.7 to 1.3, adjusted p = 0.2, 5 seeds).",
        ),
        (
            (1, 0, 1.1, None, None, None),
            "a and b share only one seed on dino (1.1 times as fast): a test needs two.",
        ),
        ((1, 1, 1.1, None, None, None), "a never reached the final quality of b on dino, in 1 run."),
        ((0, 0, None, None, None, None), "a and b have no runs on dino that could be compared by the updates they need."),
    ],
)  # fmt: skip
def test_sentences_about_speed(figures, text):
    keys = ("n", "censored", "speedup", "ci_low", "ci_high", "p_adjusted")
    rows = [{"arm": "a", "dataset": "dino", **dict(zip(keys, figures, strict=True))}, {"arm": "b", "dataset": "dino"}]
    assert [verdict.sentence for verdict in speedup_findings(rows, "b")] == [text]


def test_sentences_about_speed_come_from_rows():
    rng = np.random.default_rng(0)
    rows = speedups(noisy_curves(rng, {"fast": 2.0, "base": 1.0, "slow": 0.5}, 5, 1e-3), "base")
    fast, slow = speedup_findings(rows, "base")
    assert (fast.word, slow.word) == ("faster", "never as good")
    assert slow.sentence == "slow never reached the final quality of base on dino, in 5 runs."
