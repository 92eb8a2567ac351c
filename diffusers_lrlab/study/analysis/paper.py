"""
Results of the paper "Optimizing Diffusion Models: A Comparative Study of Learning Rate Schedules", as data.

Each value is of one arm and one data set; the paper gives no usable spread. Its "baseline, no schedule" equals, to the third
decimal, the cosine run of the code that the paper is built on, so it is named as such here.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..runs.results import RunResult

DATASETS = ("circle", "dino", "line", "moons")


class Quantity(NamedTuple):
    """A column of the paper's table."""

    label: str
    decimals: int
    metric: str | None = None  # name among the results of a run
    seconds: str | None = None  # or, for times, the key in the `train` section of a record


QUANTITIES = (
    Quantity("training time, s", 2, seconds="training_seconds"),
    Quantity("eval loss", 3, metric="training_set_loss"),
    Quantity("inference time, s", 2, seconds="sampling_seconds"),
    Quantity("KL, bits", 3, metric="kl"),
)

# Arms of the presets under the paper's names. The paper has no constant learning rate.
ARM_LABELS = {
    "paper_baseline": "“baseline” (in truth cosine)",
    "step": "StepLR",
    "exponential": "ExponentialLR",
    "plateau": "ReduceLROnPlateau",
    "cosine": "CosineAnnealingLR",
    "constant": "constant (not in the paper)",
}
# Our arm for a row of the paper, where the names differ.
OURS = {"paper_baseline": "cosine"}

# A row for each arm: for each of DATASETS, the values in the order of QUANTITIES.
_TABLE = """
paper_baseline 127.74 0.438 0.89 0.343  128.44 0.663 0.92 1.063  129.12 0.807 0.67 0.168  129.21 0.613 1.03 0.088
step           109.53 0.804 0.85 6.034  109.80 0.892 1.05 7.142  111.87 0.842 0.84 0.422  108.61 0.825 0.88 2.624
exponential    109.07 0.574 0.64 2.569  107.92 0.800 0.57 6.570  111.73 0.820 0.62 0.269  107.13 0.710 0.60 1.530
plateau        114.61 0.763 0.88 5.571  112.58 0.885 0.70 7.116  114.36 0.902 0.81 0.704  114.42 0.789 0.71 2.434
cosine         111.48 0.449 0.53 0.333  109.98 0.681 0.76 1.636  110.18 0.807 0.99 0.172  109.36 0.624 0.80 0.098
"""
_ROWS = {
    arm: np.array(figures, float).reshape(len(DATASETS), len(QUANTITIES)).tolist()
    for arm, *figures in map(str.split, _TABLE.strip().splitlines())
}


def nearest_arms(results: Iterable[RunResult]) -> list[dict[str, Any]]:
    """
    For each row of the paper and each arm, the overall factor between their values of loss and KL.

    Rows have the keys paper_row, arm, off_by (the mean of |log(ours / paper's)| over data sets and both metrics, as a
    factor: 1 is equal) and on (data sets); the nearest arm of each row of the paper comes first.
    """
    figures: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        if {"training_set_loss", "kl"} <= {*result.results} and result.dataset in DATASETS:
            pair = (result.results["training_set_loss"], result.results["kl"])
            figures.setdefault(result.arm, {}).setdefault(result.dataset, []).append(pair)
    rows = []
    for paper_row in _ROWS:
        found: list[dict[str, Any]] = []
        for arm, by_dataset in figures.items():
            papers = [_ROWS[paper_row][DATASETS.index(dataset)][1::2] for dataset in by_dataset]  # loss and KL
            ours = [np.maximum(np.mean(pairs, axis=0), 1e-3) for pairs in by_dataset.values()]
            off_by = float(np.exp(np.mean(np.abs(np.log(np.array(ours) / papers)))))
            found.append({"paper_row": ARM_LABELS[paper_row], "arm": arm, "off_by": off_by, "on": ", ".join(by_dataset)})
        rows += sorted(found, key=lambda row: row["off_by"])
    return rows


def reported(arm: str, dataset: str) -> list[float] | None:
    """The paper's values, in the order of `QUANTITIES`; `None` where the paper has none."""
    return _ROWS[arm][DATASETS.index(dataset)] if arm in _ROWS and dataset in DATASETS else None
