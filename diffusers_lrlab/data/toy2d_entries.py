"""The 2-D toy datasets: how each is sampled, and its density if that has a closed form."""

import math
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any

import numpy as np

from ..core.extras import require_extra
from ..core.registered import Unusable, real_values
from ..core.registry import Registry
from . import densities

LogProb = Callable[[np.ndarray], np.ndarray]


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

_TEMPLATE = "2d_diffusion template of SakanaAI/AI-Scientist"
_FFJORD = "after the toy sets of FFJORD, arXiv 1810.01367"


def _checked(log_prob: LogProb) -> LogProb:
    def checked(points: np.ndarray) -> np.ndarray:
        if np.ndim(points) != 2 or np.shape(points)[1] != 2:
            raise ValueError(f"Expected points of shape (n, 2), got {np.shape(points)}.")
        return log_prob(points)

    return checked


def _register(
    name: str, description: str, source: str, log_prob: LogProb | None = None, traits: tuple[str, ...] = ()
) -> Callable[[Any], Any]:
    if log_prob is not None:
        LOG_PROBS[name] = _checked(log_prob)
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
    lambda points: densities.discs_log_prob(
        points, _CIRCLE_RADIUS * _circle_directions()[0], _circle_directions()[1], _CIRCLE_JITTER
    ),
)
def circle(n: int, rng: np.random.Generator) -> np.ndarray:
    """A direction to a point of a grid, plus a jitter that is uniform in radius and angle."""
    directions, probabilities = _circle_directions()
    centres = _CIRCLE_RADIUS * directions[rng.choice(len(directions), n, p=probabilities)]
    radius, angle = rng.uniform(0, _CIRCLE_JITTER, n), rng.uniform(0, 2 * math.pi, n)
    return centres + _at(radius, angle)


_LINE_LOG_PROB = partial(densities.rectangles_log_prob, corners=np.array([[-2, -4]]), size=(4, 8))


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
        return densities.mixture_log_prob(points, shape_centres(name), scales)

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
_BLACK_LOG_PROB = partial(densities.rectangles_log_prob, corners=_BLACK, size=(2, 2))


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
_EIGHT_LOG_PROB = partial(densities.mixture_log_prob, centres=_EIGHT, scales=_EIGHT_NOISE)


@_register("eight_gaussians", "eight Gaussians of width 0.3 on a circle of radius 3", _FFJORD, _EIGHT_LOG_PROB)
def eight_gaussians(n: int, rng: np.random.Generator) -> np.ndarray:
    return _EIGHT[rng.integers(8, size=n)] + rng.normal(size=(n, 2)) * _EIGHT_NOISE


_RADII, _RING_NOISE = np.array([1.0, 2.0, 3.0, 4.0]), 0.1
_RINGS_LOG_PROB = partial(densities.rings_log_prob, radii=_RADII, scale=_RING_NOISE)


@_register("rings", "four concentric circles, with noise", _FFJORD, _RINGS_LOG_PROB)
def rings(n: int, rng: np.random.Generator) -> np.ndarray:
    radius, angle = _RADII[rng.integers(4, size=n)], rng.uniform(0, 2 * math.pi, n)
    return _at(radius, angle) + _RING_NOISE * rng.normal(size=(n, 2))
