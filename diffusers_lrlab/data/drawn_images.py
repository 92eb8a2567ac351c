"""Images drawn from a seed, so that the truth about a set is known: coloured shapes of named factors, and letters."""

from __future__ import annotations

import colorsys
import math
import string
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..core.streams import stream_seed
from .image_sets import ImageSet

# --- shapes -------------------------------------------------------------------------------------------------------------

SHAPES = ("circle", "triangle", "square", "star")
"""The values of the factor `kind`, which are the labels."""

CORNERS = (1, 3, 4, 5)
"""The order of rotational symmetry of each shape; a circle has no rotation to speak of."""

SIZES = (0.14, 0.24)
PLACES = (0.38, 0.62)  # the largest triangle still fits

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


FACTORS = tuple(field.name for field in fields(Factors))
RANGES = {"hue": (0.0, 1.0), "size": SIZES, "x": PLACES, "y": PLACES, "rotation": (0.0, 1.0)}
"""The interval of each factor that is a real number."""


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
    fine = max(_FEWEST, math.ceil(_CELLS / resolution))
    step = max(1, _AT_ONCE // (resolution * fine) ** 2)
    starts = tqdm(range(0, len(factors), step), desc="draw shapes", disable=None, leave=False, delay=2)
    parts = [_render(factors[start : start + step], resolution, fine) for start in starts]
    return np.concatenate(parts) if parts else np.empty((0, resolution, resolution, 3), np.uint8)


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


def make_shapes_set(n: int, seed: int, split: str, resolution: int) -> ImageSet:
    """The registered set: images, kinds as labels, and a column for each other factor."""
    factors = draw_factors(n, seed, split)
    columns = {name: getattr(factors, name) for name in RANGES}
    return ImageSet(render_shapes(factors, resolution), factors.kind, columns)


# --- letters ------------------------------------------------------------------------------------------------------------

LETTERS = tuple(string.ascii_uppercase)
"""The labels."""

FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "DejaVu Sans": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
        "DejaVu Sans Mono": ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
        "DejaVu Serif": ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
        "Computer Modern": ("cmr10", "cmb10", "cmss10"),
    },
    "test": {"STIX": ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")},
}
"""Font files by family; no family is in both splits."""

_LETTER = 0.6  # height of a capital letter, as a fraction of the side
_SCALES, _SHIFT, _TURN = (0.8, 1.1), 0.06, 10.0  # of the height; fraction of the side; degrees, either way
_FINE = 128  # pixels of a side, at least, at which letters are drawn before they are reduced


def glyph_files(split: str) -> list[str]:
    """The names of the font files of a split, without ending."""
    return [name for names in FAMILIES[split].values() for name in names]


def make_glyphs_set(n: int, seed: int, split: str, resolution: int) -> ImageSet:
    """
    The registered set: black capital letters on white, each in a random font, size, place and slight rotation.

    The labels are indices of [`LETTERS`]; the column `font` has the names of font files.
    """
    files = glyph_files(split)
    of = {
        name: np.random.default_rng(stream_seed(seed, f"glyphs/{split}/{name}")).random((n, 3)) for name in ("what", "how")
    }
    letters, fonts = ((of["what"][:, column] * len(all_)).astype(np.int64) for column, all_ in enumerate((LETTERS, files)))
    scale = _SCALES[0] + (_SCALES[1] - _SCALES[0]) * of["what"][:, 2]
    shift, turn = (2 * of["how"][:, :2] - 1) * _SHIFT, (2 * of["how"][:, 2] - 1) * _TURN
    images = np.empty((n, resolution, resolution), np.uint8)
    for row in tqdm(range(n), desc="draw glyphs", disable=None, leave=False, delay=2):
        letter, file = LETTERS[letters[row]], files[fonts[row]]
        images[row] = _draw(letter, file, scale[row], shift[row], turn[row], resolution)
    return ImageSet(images, letters, {"font": np.array(files)[fonts]})


def _draw(letter: str, file: str, scale: float, shift: np.ndarray, degrees: float, resolution: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    factor = -(-_FINE // resolution)
    side = resolution * factor
    image = Image.new("L", (side, side), 255)
    font = _font(file, round(side * _LETTER * scale / _height_of_capitals(file)))
    left, top, right, bottom = font.getbbox(letter)
    at = side / 2 - (left + right) / 2 + shift[0] * side, side / 2 - (top + bottom) / 2 + shift[1] * side
    ImageDraw.Draw(image).text(at, letter, fill=0, font=font)
    turned = image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=255)
    return np.asarray(turned.reduce(factor))


@cache
def _font(file: str, size: int) -> Any:
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{file}.ttf", size)


@cache
def _height_of_capitals(file: str) -> float:
    """As a fraction of the font's size."""
    left, top, right, bottom = _font(file, 1000).getbbox("H")
    return (bottom - top) / 1000
