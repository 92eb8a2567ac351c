"""What makes pages fit narrow screens: plots that stay large enough to be read, and code and numbers that break well."""

import io
import re
from collections.abc import Callable

from PIL import Image

from diffusers_lrlab.core.plotting import SMALLEST_TEXT

SMALLEST = 11  # pixels, of text
LARGEST = 1.25  # times the width at which the smallest text of a plot has `SMALLEST` pixels
DEFAULT_TEXT = 10.0  # points, of matplotlib
OLD_DPI, OLD_TEXT = 130, 7.0  # of plots of studies that do not name their resolution and their text yet
_IMAGE = re.compile(r'<img alt="[^"]*" src="([^"]+\.png)" ?/?>')
_CELL = re.compile(r"(<t[dh][^>]*>)(.*?)(?=</t[dh]>)", re.DOTALL)
_CODE = re.compile(r"(<code[^>]*>)(.*?)(?=</code>)", re.DOTALL)
_NO_FLAG = re.compile(r"(<code[^>]*>)(?!(?:<span[^>]*>)?--\w+(?:</span>)?</code>)(.*?)(?=</code>)", re.DOTALL)
_OUTPUT = re.compile(r'<div class="highlight">(<pre>.*?</pre>)', re.DOTALL)
_NOT_TEXT = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<math.*?</math>|<[^>]*>)", re.DOTALL)


def with_sizes(html: str, read: Callable[[str], bytes]) -> str:
    """
    A page whose plots are never so small that their text cannot be read: they scroll where there is no room. Sampled images
    are marked, since they keep their colours in the dark. `read` returns the file that a source names.
    """

    def with_size(match: re.Match[str]) -> str:
        with Image.open(io.BytesIO(read(match[1]))) as image:
            is_sampled = "samples" in match[1] and image.mode != "P"  # plots of points have a palette
            attributes = 'class="as-sampled" ' * is_sampled
            if not match[1].endswith("lrlab/samples.png"):  # which has no text
                attributes += 'style="min-width: {:.0f}px; width: {:.0f}px" '.format(*_widths(image, match[1]))
        return match[0].replace("<img ", f"<img {attributes}", 1)

    return _IMAGE.sub(with_size, html)


def _widths(image: Image.Image, source: str) -> tuple[float, float]:
    """The least width at which the text of a picture can be read, and a comfortable one, in pixels."""
    dpi = image.info.get("dpi", (OLD_DPI,))[0]
    if "dpi" not in image.info and "model_cards" not in source:  # of a screen
        return image.width, image.width
    text = image.info.get(SMALLEST_TEXT) or (DEFAULT_TEXT if "dpi" in image.info else OLD_TEXT)
    least = SMALLEST * 72 / float(text) * image.width / dpi
    return least, min(LARGEST * least, max(least, image.width))


def with_breaks(html: str) -> str:
    """
    Code in tables may break after a separator, but flags below the head do not. Numbers stay with their units, stops with
    their formulas, and flags in one line.
    """
    html = _CELL.sub(_with_breaks_in_code, html)
    html = re.sub(r"(<math(?:(?!</math>).)*</math>)([.,;:)]+)", r'<span class="whole">\1\2</span>', html, flags=re.DOTALL)
    parts = _NOT_TEXT.split(html)
    return "".join(part if number % 2 else _together(part) for number, part in enumerate(parts))


def _with_breaks_in_code(cell: re.Match[str]) -> str:
    code = _CODE if cell[1].startswith("<th") else _NO_FLAG
    return cell[1] + code.sub(_breakable, cell[2])


def _breakable(code: re.Match[str]) -> str:
    parts = re.sub(r"(?<=[a-z0-9])([_.,:=])(?=[a-zA-Z0-9])(?![^<]*>)", r"\1<wbr>", code[2])
    return code[1] + re.sub(r"(?<=[a-zA-Z0-9])/(?=[a-zA-Z0-9])(?![^<]*>)", '/<wbr class="folder">', parts)


def _together(text: str) -> str:
    text = re.sub(r"(?<=\d) (?=%|±)|(?<=±) (?=\d)", "\u00a0", text)
    text = re.sub(r"(?<![\w-])--[a-z]\w*", r'<span class="whole">\g<0></span>', text)
    return re.sub(r"(\([−+-]?[\d.,]+(?:\u00a0%)?) to ([−+-]?[\d.,]+(?:\u00a0%)?\))", "\\1\u00a0to\u00a0\\2", text)


def with_columns(html: str) -> str:
    """Output in columns is marked as text, which scrolls; other output goes on in the next line."""

    def marked(match: re.Match[str]) -> str:
        is_code = '<span class="' in match[1]
        has_columns = re.search(r"\S {2,}\S", re.sub(r"<[^>]*>", "", match[1]))
        return f'<div class="language-text highlight">{match[1]}' if has_columns and not is_code else match[0]

    return _OUTPUT.sub(marked, html)
