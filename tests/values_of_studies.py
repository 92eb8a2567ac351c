"""Values of made-up studies for tests of statistics."""

import math

import numpy as np
from scipy import stats

from diffusers_lrlab.study.analysis.statistics import (
    compare,
)


def by_seed(*figures):
    """Figures of the seeds 0, 1, 2, ...; `None` for a run without one."""
    return {seed: value for seed, value in enumerate(figures) if value is not None}


def row_of(rows, arm, dataset="dino"):
    return next(row for row in rows if (row["arm"], row["dataset"]) == (arm, dataset))


def two_arms(figures, baseline, metric="kl", **options):
    """The row of arm "a" against the baseline "b" on one data set."""
    values = {"a": {"dino": by_seed(*figures)}, "b": {"dino": by_seed(*baseline)}}
    return row_of(compare(values, "b", metric, **options), "a")


def simulated(seed, num_arms=4, num_datasets=2, num_seeds=5, effect=0.0, spread=1.0):
    """A study whose arms 1, 2, ... differ from arm 0 by `effect`, with figures around 10 that share what a seed gives."""
    rng = np.random.default_rng(seed)
    shared = 10 + rng.normal(size=(1, num_datasets, num_seeds))
    figures = shared + spread * rng.normal(size=(num_arms, num_datasets, num_seeds)) / math.sqrt(2)
    figures[1:] += effect
    return {f"arm{i}": {f"set{j}": by_seed(*of_set) for j, of_set in enumerate(of_arm)} for i, of_arm in enumerate(figures)}


def within(hits, trials, probability, level=1e-4):
    """Whether so many hits are what chance gives, by an exact test."""
    return stats.binomtest(hits, trials, probability).pvalue > level
