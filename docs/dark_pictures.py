"""Pictures of the README for dark pages, from those on white: lightness is turned round, hues stay, as on the site.

python docs/dark_pictures.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

DOCS = Path(__file__).parent
PICTURES = {  # by the name in docs/dark/
    "schedules": DOCS / "schedules.png",
    "points": DOCS.parent / "model_cards/flow-or-ddpm-2d/samples.png",
}
# hue-rotate(180deg) of CSS, https://www.w3.org/TR/filter-effects-1/#feColorMatrixElement
_TURN = np.array([[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]])
_LEFT = 0.12  # of the inversion, as in docs/style.css: black is no pure white, and white no pure black


def dark(path: Path) -> Image.Image:
    picture = Image.open(path).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    values = np.asarray(picture) / 255
    turned = (_LEFT + (1 - 2 * _LEFT) * (1 - values)) @ _TURN.T
    return Image.fromarray(np.round(255 * turned.clip(0, 1)).astype(np.uint8)).quantize(64)


if __name__ == "__main__":
    (DOCS / "dark").mkdir(exist_ok=True)
    for name, path in PICTURES.items():
        dark(path).save(DOCS / "dark" / f"{name}.png", optimize=True)
        print(f"Wrote docs/dark/{name}.png.")
