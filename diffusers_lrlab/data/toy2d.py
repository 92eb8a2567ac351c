"""The classic 2-D toy datasets of diffusion research as Hugging Face datasets; their registry is in `toy2d_entries.py`.

Each is a distribution from which any number of points can be sampled, with its density if that has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..core.extras import require_extra
from ..core.ranges import Range
from ..core.signatures import checked
from ..core.streams import stream_seed
from .toy2d_entries import LOG_PROBS, TOY_DATASETS

if TYPE_CHECKING:
    import datasets

MAX_POINTS = 100_000_000


def list_toy_datasets() -> list[str]:
    """The names that `load_toy_dataset` and `--dataset_name` take."""
    return list(TOY_DATASETS)


def check_draw(name: str, n: int, seed: int, called: str = "n", least: int = 1) -> None:
    """Checks a name, a number of points (the argument `called`) and a seed."""
    TOY_DATASETS[name]
    Range(f"[{least}, {MAX_POINTS}]", whole=True).check(called, n, f"it is the number of points of {name!r}")
    Range("(-inf, inf)", whole=True).check("seed", seed, "42 is the default")


@checked
def toy_points(name: str, n: int = 100_000, seed: int = 42, split: Literal["train", "test"] = "train") -> np.ndarray:
    """
    Points of a toy dataset, float32 of shape `(n, 2)`.

    Args:
        name (`str`): A name of [`list_toy_datasets`].
        n (`int`): The number of points; a larger sample does not begin with the same points.
        seed (`int`): The seed of the generator.
        split (`"train"` or `"test"`): One of two independent samples.
    """
    check_draw(name, n, seed)
    rng = np.random.default_rng(stream_seed(int(seed), f"toy2d/{name}/{split}"))
    return TOY_DATASETS[name](n, rng).astype(np.float32)


@checked
def load_toy_dataset(
    name: str, n: int = 100_000, seed: int = 42, split: Literal["train", "test"] = "train"
) -> datasets.Dataset:
    """
    A toy dataset with one column `x` of float32 and shape `(2,)`.

    See [`toy_points`] for arguments and errors.
    """
    require_extra("train", "A data set of datasets", ["datasets", "pyarrow"])
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value

    points = toy_points(name, n, seed, split)
    column = pa.FixedSizeListArray.from_arrays(pa.array(points.reshape(-1)), points.shape[1])
    return Dataset.from_dict({"x": column}, features=Features({"x": List(Value("float32"), length=points.shape[1])}))


@checked
def toy_log_prob(name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """
    The log density of a toy dataset; `None` if it has no closed form.

    It is a function from points `(n, 2)` to natural logarithms `(n,)`, float64; `-inf` outside the support.
    """
    return LOG_PROBS.get(TOY_DATASETS[name].name)
