"""The classic 2-D toy datasets of diffusion research: how each is sampled, and its density if that has a closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.environment import require_extra
from ..core.plugins import Unusable, real_values
from ..core.registry import Registry
from ..core.streams import stream_seed
from ..core.values import Range, checked

if TYPE_CHECKING:
    import datasets

LogProb = Callable[[np.ndarray], np.ndarray]
MAX_POINTS = 100_000_000
_CHUNK_PAIRS = 4_000_000  # points times components at a time: 32 MB


def _check_points(value: Any, n: int, *_: Any) -> np.ndarray:
    wanted = f"an array of real numbers of shape ({n}, 2)"
    points = np.asarray(real_values(value, wanted, (n, 2)))
    if not np.isfinite(points).all():
        raise Unusable(f"must return {wanted}; some of those returned are nan or infinite")
    return points


TOY_DATASETS = Registry(
    "toy data set",
    traits={"shape": "its points are from data-morph-ai"},
    shown_facts={"density": "density in closed form"},
    returns=_check_points,
)
"""
Entries are functions `f(n, rng) -> points` that sample `n` points, float64 `(n, 2)`. The fact `density` is "yes" for those
in `LOG_PROBS`.
"""

LOG_PROBS: dict[str, LogProb] = {}
"""Natural logarithms of densities, as functions from points `(n, 2)` to float64 `(n,)`."""


# --- closed-form log densities: natural logarithms for points `(n, 2)`, float64 `(n,)` --------------------------------


def mixture_log_prob(points: np.ndarray, centres: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """
    Log density of a mixture of Gaussians with equal weights, centres `(components, dimension)` and common standard
    deviations along the axes, `(dimension,)`.
    """
    from scipy.spatial.distance import cdist
    from scipy.special import logsumexp

    scaled, means = np.asarray(points, np.float64) / scales, centres / scales
    constant = -0.5 * means.shape[1] * math.log(2 * math.pi) - np.log(scales).sum() - math.log(len(means))
    size = max(1, _CHUNK_PAIRS // len(means))
    chunks = [scaled[start : start + size] for start in range(0, max(1, len(scaled)), size)]
    return np.concatenate([logsumexp(-0.5 * cdist(chunk, means, "sqeuclidean"), axis=1) + constant for chunk in chunks])


def rectangles_log_prob(points: np.ndarray, corners: np.ndarray, size: tuple[float, float]) -> np.ndarray:
    """Log density of a uniform distribution on disjoint rectangles of one `size`, given by their lower left corners."""
    offsets = np.asarray(points, np.float64)[:, None] - corners
    inside = ((offsets >= 0) & (offsets <= np.asarray(size))).all(axis=2).any(axis=1)
    return np.where(inside, -math.log(len(corners) * size[0] * size[1]), -np.inf)


def rings_log_prob(points: np.ndarray, radii: np.ndarray, scale: float) -> np.ndarray:
    r"""
    Log density of points on circles around the origin, all equally likely, plus Gaussian noise.

    The mean of a Gaussian over a circle of radius R is \(e^{-(r^2 + R^2) / 2 s^2} I_0(r R / s^2) / 2 \pi s^2\).
    """
    from scipy.special import i0e, logsumexp

    r = np.linalg.norm(np.asarray(points, np.float64), axis=1)[:, None]
    # i0e is I_0 scaled by e^-x, which completes the square.
    logs = -((r - radii) ** 2) / (2 * scale**2) + np.log(i0e(r * radii / scale**2))
    return logsumexp(logs, axis=1) - math.log(2 * math.pi * scale**2 * len(radii))


def discs_log_prob(points: np.ndarray, centres: np.ndarray, weights: np.ndarray, radius: float) -> np.ndarray:
    """Log density of points at a uniform distance, up to `radius`, and in a uniform direction from disjoint centres."""
    from scipy.spatial import cKDTree

    distances, nearest = cKDTree(centres).query(np.asarray(points, np.float64))
    # Uniform in distance, not in area, so the density is unbounded towards the centre.
    with np.errstate(divide="ignore"):
        logs = np.log(weights[nearest]) - np.log(2 * math.pi * radius * distances)
    # Rounding to float32 may move points across the edge.
    return np.where(distances <= radius + 1e-6, logs, -np.inf)


# --- the sets -----------------------------------------------------------------------------------------------------------

_TEMPLATE = "2d_diffusion template of SakanaAI/AI-Scientist"
_FFJORD = "after the toy sets of FFJORD, arXiv 1810.01367"


def _register(
    name: str, description: str, source: str, log_prob: LogProb | None = None, traits: tuple[str, ...] = ()
) -> Callable[[Any], Any]:
    if log_prob is not None:
        LOG_PROBS[name] = log_prob
    facts = {"density": "no" if log_prob is None else "yes"}
    return TOY_DATASETS.register(name, description=description, source=source, traits=traits, facts=facts)


def _at(radius: np.ndarray | float, angle: np.ndarray) -> np.ndarray:
    """Points from polar coordinates."""
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


# --- of the study ----------------------------------------------------------------------------------------------------

_GRID = np.array([(x, y) for x in range(-2, 3) for y in range(-2, 3)])
_CIRCLE_RADIUS, _CIRCLE_JITTER = 3.0, 0.09


def _circle_directions() -> tuple[np.ndarray, np.ndarray]:
    """The 16 directions to the points of a 5x5 grid and 0 for the origin, with their probabilities."""
    reduced = _GRID // np.maximum(np.gcd(_GRID[:, 0], _GRID[:, 1]), 1)[:, None]
    directions, counts = np.unique(reduced, axis=0, return_counts=True)
    norms = np.linalg.norm(directions, axis=1, keepdims=True)
    return directions / np.where(norms == 0, 1, norms), counts / len(_GRID)


@_register(
    "circle",
    "16 small discs on a circle of radius 3, and one in the middle with 4 % of the points",
    f"{_TEMPLATE}, where rounding causes the discs",
    lambda points: discs_log_prob(points, _CIRCLE_RADIUS * _circle_directions()[0], _circle_directions()[1], _CIRCLE_JITTER),
)
def circle(n: int, rng: np.random.Generator) -> np.ndarray:
    """A direction to a point of a grid, plus a jitter that is uniform in radius and angle."""
    directions, probabilities = _circle_directions()
    centres = _CIRCLE_RADIUS * directions[rng.choice(len(directions), n, p=probabilities)]
    radius, angle = rng.uniform(0, _CIRCLE_JITTER, n), rng.uniform(0, 2 * math.pi, n)
    return centres + _at(radius, angle)


_LINE_LOG_PROB = partial(rectangles_log_prob, corners=np.array([[-2, -4]]), size=(4, 8))


@_register("line", "a filled rectangle, 4 by 8", _TEMPLATE, _LINE_LOG_PROB)
def line(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform((-2, -4), (2, 4), (n, 2))


@_register("moons", "two interleaving half circles", f"{_TEMPLATE}; sklearn.datasets.make_moons")
def moons(n: int, rng: np.random.Generator) -> np.ndarray:
    """scikit-learn's, with a noise of 0.03 before it is scaled."""
    require_extra("train", "The toy data set 'moons'", ["sklearn"])
    from sklearn.datasets import make_moons

    points, _ = make_moons(n, noise=0.03, random_state=int(rng.integers(2**32)))
    return (points + 0.3) * (2, 3) - 1


# --- shapes of points ------------------------------------------------------------------------------------------------

_DINO_NOISE = np.array([4 * 0.15 / 54, 4 * 0.15 / 48])
_SHAPE_NOISE = np.array([0.0125, 0.0125])
_SHAPES = {
    "bunny": "the head of a bunny",
    "cat": "a cat",
    "dog": "a dog",
    "gorilla": "a gorilla",
    "music": "a musical note",
    "panda": "the head of a panda",
    "pi": "the letter pi",
    "python": "the logo of Python, a trademark of the Python Software Foundation",
    "sheep": "a sheep",
    "soccer_ball": "a soccer ball",
    "superdatascience": "the logo of SuperDataScience",
}


@cache
def shape_centres(name: str) -> np.ndarray:
    """
    The points of a shape that data-morph-ai carries, float64 `(num_points, 2)`.

    The dinosaur is scaled as in the study's template; others are centred, with their longer side from -3.6 to 3.6.
    """
    require_extra("train", f"The toy data set {name!r}", ["data_morph"])
    with (files("data_morph") / "data" / "starter_shapes" / f"{name}.csv").open() as file:
        points = np.loadtxt(file, delimiter=",", skiprows=1)
    if name == "dino":
        return (points / (54, 48) - 1) * 4
    lowest, highest = points.min(axis=0), points.max(axis=0)
    return (points - (lowest + highest) / 2) * (7.2 / (highest - lowest).max())


def _register_shape(name: str, text: str, source: str, scales: np.ndarray) -> None:
    """The points of a shape plus Gaussian noise."""

    def draw(n: int, rng: np.random.Generator) -> np.ndarray:
        centres = shape_centres(name)
        return centres[rng.integers(len(centres), size=n)] + rng.normal(size=(n, 2)) * scales

    def log_prob(points: np.ndarray) -> np.ndarray:
        return mixture_log_prob(points, shape_centres(name), scales)

    _register(name, f"{text}, with noise", source, log_prob, ("shape",))(draw)


_DATASAURUS = "the 142 points of Alberto Cairo's Datasaurus"
_register_shape("dino", _DATASAURUS, f"{_TEMPLATE}; the points are those in data-morph-ai", _DINO_NOISE)
for _name, _text in _SHAPES.items():
    _register_shape(_name, _text, "data-morph-ai (S. Molin, MIT licence)", _SHAPE_NOISE)


# --- other classics --------------------------------------------------------------------------------------------------


@_register("swiss_roll", "a spiral of one and a half turns, with noise", "sklearn.datasets.make_swiss_roll, from the side")
def swiss_roll(n: int, rng: np.random.Generator) -> np.ndarray:
    """scikit-learn's without its third dimension, with a noise of 0.4 before it is scaled."""
    require_extra("train", "The toy data set 'swiss_roll'", ["sklearn"])
    from sklearn.datasets import make_swiss_roll

    points, _ = make_swiss_roll(n, noise=0.4, random_state=int(rng.integers(2**32)))
    return points[:, [0, 2]] * (4 / 15)


_BLACK = np.array([(x, y) for x in range(-4, 4, 2) for y in range(-4, 4, 2) if (x + y) % 4 == 0])
_BLACK_LOG_PROB = partial(rectangles_log_prob, corners=_BLACK, size=(2, 2))


@_register("checkerboard", "the black squares of a 4x4 board", _FFJORD, _BLACK_LOG_PROB)
def checkerboard(n: int, rng: np.random.Generator) -> np.ndarray:
    return _BLACK[rng.integers(len(_BLACK), size=n)] + rng.uniform(0, 2, (n, 2))


@_register("spirals", "two spirals of one and a half turns, with noise", _FFJORD)
def spirals(n: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform in the squared radius, plus Gaussian noise of 0.1."""
    angle = 3 * math.pi * np.sqrt(rng.uniform(size=n))
    radius = (4 / (3 * math.pi)) * angle * rng.choice((-1, 1), n)
    return _at(radius, angle) * (-1, 1) + 0.1 * rng.normal(size=(n, 2))


_EIGHT = 3 * _at(1.0, np.arange(8) * math.pi / 4)
_EIGHT_NOISE = np.array([0.3, 0.3])
_EIGHT_LOG_PROB = partial(mixture_log_prob, centres=_EIGHT, scales=_EIGHT_NOISE)


@_register("eight_gaussians", "eight Gaussians of width 0.3 on a circle of radius 3", _FFJORD, _EIGHT_LOG_PROB)
def eight_gaussians(n: int, rng: np.random.Generator) -> np.ndarray:
    return _EIGHT[rng.integers(8, size=n)] + rng.normal(size=(n, 2)) * _EIGHT_NOISE


_RADII, _RING_NOISE = np.array([1.0, 2.0, 3.0, 4.0]), 0.1
_RINGS_LOG_PROB = partial(rings_log_prob, radii=_RADII, scale=_RING_NOISE)


@_register("rings", "four concentric circles, with noise", _FFJORD, _RINGS_LOG_PROB)
def rings(n: int, rng: np.random.Generator) -> np.ndarray:
    radius, angle = _RADII[rng.integers(4, size=n)], rng.uniform(0, 2 * math.pi, n)
    return _at(radius, angle) + _RING_NOISE * rng.normal(size=(n, 2))


# --- for users ----------------------------------------------------------------------------------------------------------


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
