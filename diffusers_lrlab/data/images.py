"""From an image file to a tensor in [-1, 1], with PIL and torch alone.

One path for every mode of image: grey, colour, palette, transparent (laid on white), 16-bit and float. Precision is
kept unless 8 bits are asked for.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.errors import LabError
from ..core.streams import stream_seed, stream_uniform

if TYPE_CHECKING:
    from PIL.Image import Image


_LONGEST_SIDE = 16_384  # pixels of a strip of an image, beyond which it is taken for damaged


def to_unit_tensor(image: Image, channels: int) -> torch.Tensor:
    """
    A PIL image of any mode as float32 of shape `(channels, height, width)` in [0, 1].

    Transparency becomes white, CMYK and the like become RGB, and colour becomes grey by PIL's luma for one channel. Raises a
    `LabError` for a float or integer image whose values have no known scale.
    """
    if image.mode.startswith("I") or image.mode == "F":
        # PIL's conversion of 16-bit images clips at 255; files of some formats open as "I".
        largest = 1 if image.mode == "F" else 65535
        pixels = torch.from_numpy(np.asarray(image).astype(np.float32))[None]
        if not (pixels.min() >= 0 and pixels.max() <= largest):
            raise LabError(
                f"An image of mode {image.mode!r} has values from {pixels.min():g} to {pixels.max():g}; only "
                f"[0, {largest}] has a known meaning. Rescale it, or store it as an 8- or 16-bit image."
            )
        pixels /= largest
    else:
        if image.has_transparency_data:
            from PIL import Image as images

            image = image.convert("RGBA")
            image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")  # also on the way to grey, which not every mode can be converted to
        array = np.asarray(image.convert("L") if channels == 1 else image, dtype=np.float32) / 255
        pixels = torch.from_numpy(array)
        pixels = pixels[None] if channels == 1 else pixels.permute(2, 0, 1)
    return pixels.expand(channels, -1, -1)


@dataclass(frozen=True)
class ImageTransform:
    """
    Resize, crop, flip, and scale to [-1, 1].

    Crops and flips depend on the seed and on the image's number in the run (how many images were seen before it), so they
    are the same for any number of workers and processes, and after a resume.
    """

    resolution: int  # pixels of the shorter side after resizing (antialiased bilinear), and of the square crop
    channels: int  # 1 or 3
    center_crop: bool  # crop in the middle, instead of at a random place
    random_flip: bool  # flip half of the images horizontally
    eight_bit: bool  # round to 8 bits first, as upstream does by default
    seed: int  # of the run

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.resolution, self.resolution)

    @property
    def is_random(self) -> bool:
        return self.random_flip

    def read(self, cell: Any) -> torch.Tensor:
        """The image in a cell of an undecoded `datasets.Image` column, resized; a `LabError` names one that is corrupt."""
        try:
            return self.resize(decode(cell))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            raise LabError(
                f"The image {name!r} cannot be read: {error} Replace or remove it, or pass --skip_corrupt_images."
            ) from None

    def resize(self, image: Image) -> torch.Tensor:
        """The deterministic part: float32 `(channels, height, width)` in [-1, 1], the shorter side at `resolution`."""
        pixels = to_unit_tensor(image, self.channels)
        if self.eight_bit:
            pixels = (pixels * 255).round() / 255
        height, width = pixels.shape[-2:]
        scale = self.resolution / min(height, width)
        size = (max(self.resolution, round(height * scale)), max(self.resolution, round(width * scale)))
        if max(size) > _LONGEST_SIDE and max(size) > 100 * min(size):
            raise LabError(f"it has {width}x{height} pixels, a strip that would have {size[1]}x{size[0]} once resized.")
        if (height, width) != size:
            pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
        return (pixels * 2 - 1).contiguous()

    def augment(self, pixels: torch.Tensor, image_number: int) -> torch.Tensor:
        """The random part: a square crop of a resized image, perhaps flipped."""
        pixels = self._crop(pixels, None if self.center_crop else image_number)
        if self.random_flip and stream_uniform(self.seed, "flip", image_number) < 0.5:
            pixels = pixels.flip(-1)
        return pixels

    def fixed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Always cropped in the middle, never flipped."""
        return self._crop(pixels, None)

    def _crop(self, pixels: torch.Tensor, image_number: int | None) -> torch.Tensor:
        """The square in the middle, or at the random place of a numbered image."""
        for axis in (0, 1):
            room = pixels.shape[axis - 2] - self.resolution
            start = room // 2
            if room and image_number is not None:
                start = stream_seed(self.seed, "crop", axis, image_number) % (room + 1)
            pixels = pixels.narrow(axis - 2, start, self.resolution)
        return pixels


def decode(cell: Any) -> Image:
    """The image in a cell of an undecoded `datasets.Image` column (`{"bytes": ..., "path": ...}`), completely read."""
    from PIL import Image as images
    from PIL import ImageOps

    if not cell or (cell["bytes"] is None and cell["path"] is None):
        raise LabError("its cell in the dataset is empty.")
    data, path = cell["bytes"], cell["path"]
    try:
        if data is None and "://" in path:
            from datasets.utils.file_utils import xopen

            with xopen(path, "rb") as file:
                data = file.read()
        image = images.open(path if data is None else io.BytesIO(data))
        image.load()
        return ImageOps.exif_transpose(image)
    except images.UnidentifiedImageError:  # its text holds a memory address
        raise LabError("PIL knows no image format like this.") from None
    # RuntimeError is what the AVIF decoder raises.
    except (OSError, SyntaxError, ValueError, RuntimeError, images.DecompressionBombError) as error:
        raise LabError(f"{error}.") from None
