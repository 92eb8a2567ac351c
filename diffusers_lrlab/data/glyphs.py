"""Images of letters in the fonts that matplotlib ships."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..core.errors import LabError
from ..core.streams import stream_seed
from .image_sets import ImageSet

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

    path = f"{get_data_path()}/fonts/ttf/{file}.ttf"
    try:
        return ImageFont.truetype(path, size)
    except OSError:
        raise LabError(f"The font {file}.ttf of matplotlib is missing. Reinstall matplotlib.") from None


@cache
def _height_of_capitals(file: str) -> float:
    """As a fraction of the font's size."""
    left, top, right, bottom = _font(file, 1000).getbbox("H")
    return (bottom - top) / 1000
