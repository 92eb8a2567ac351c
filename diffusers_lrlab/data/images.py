"""Image files to tensors in [-1, 1], by PIL and torch.

Handles every mode: grey, colour, palette, transparent (on white), 16-bit and float. Precision is kept unless 8 bits are
requested.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.errors import LabError, is_out_of_memory
from ..core.streams import stream_seed, stream_uniform
from .image_folder import image_endings

if TYPE_CHECKING:
    from PIL.Image import Image


_LONGEST_SIDE = 16_384  # pixels; longer strips are taken for damaged images


def normalise(images: torch.Tensor) -> torch.Tensor:
    """8-bit levels as float32 in [-1, 1], with the same bits on every device; other tensors are unchanged."""
    if images.dtype != torch.uint8:
        return images
    # For a number CUDA multiplies by the reciprocal, which rounds differently from a division by a tensor.
    return images.float().div_(torch.full((), 255.0, device=images.device)).mul_(2).sub_(1)


@dataclass(frozen=True)
class ImageTransform:
    """
    Resize, crop, flip, and scale to [-1, 1].

    Crops and flips depend on the seed and the image number in the run only, so they are the same for any number of workers
    and processes, and after a resume.
    """

    resolution: int  # pixels of the shorter side after resizing (antialiased bilinear), and of the square crop
    channels: int  # 1 or 3
    center_crop: bool  # crop at the centre instead of at random
    random_flip: bool  # flip half of the images horizontally
    eight_bit: bool  # round to 8 bits first, as upstream does by default
    seed: int  # of the run

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.resolution, self.resolution)

    def read(self, cell: Any) -> torch.Tensor:
        """An image as [`resize`] gives it, from a cell of an undecoded column; a `LabError` names a corrupt one."""
        try:
            return self.resize(decode(cell))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            raise LabError(
                f"The image {name!r} cannot be read: {error} Replace or remove it, or pass --skip_corrupt_images."
            ) from None

    def resize(self, image: Image) -> torch.Tensor:
        """
        `(channels, height, width)` with the shorter side at `resolution`: 8-bit levels where nothing is lost by that, else
        float32 in [-1, 1].
        """
        width, height = image.size
        scale = self.resolution / min(height, width)
        size = (max(self.resolution, round(height * scale)), max(self.resolution, round(width * scale)))
        if max(size) > _LONGEST_SIDE and max(size) > 100 * min(size):
            raise LabError(f"it has {width}x{height} pixels, a strip that would have {size[1]}x{size[0]} once resized.")
        is_deep = image.mode.startswith("I") or image.mode == "F"  # more than 8 bits per channel
        pixels = _deep_pixels(image, self.channels) if is_deep else _levels(image, self.channels)
        if not is_deep and size == (height, width):
            return pixels.contiguous()
        if not is_deep:
            pixels = pixels.float() / 255
        if self.eight_bit:
            pixels = (pixels * 255).round() / 255
        if size != (height, width):
            pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
        return (pixels * 2 - 1).contiguous()

    def augment(self, pixels: torch.Tensor, image_numbers: Sequence[int]) -> torch.Tensor:
        """The random part of the transform, for resized images of one size: square crops, possibly flipped."""
        pixels = self.fixed(pixels) if self.center_crop else self._random_crop(pixels, image_numbers)
        if self.random_flip:
            flips = torch.tensor([stream_uniform(self.seed, "flip", number) < 0.5 for number in image_numbers])
            pixels = torch.where(flips[:, None, None, None], pixels.flip(-1), pixels)
        return pixels

    def fixed(self, pixels: torch.Tensor) -> torch.Tensor:
        """A centre crop, not flipped."""
        for axis in (-2, -1):
            pixels = pixels.narrow(axis, (pixels.shape[axis] - self.resolution) // 2, self.resolution)
        return pixels

    def _random_crop(self, pixels: torch.Tensor, image_numbers: Sequence[int]) -> torch.Tensor:
        """A square of each image, at a position that follows from its number."""
        for axis in (0, 1):
            room = pixels.shape[axis - 2] - self.resolution
            if room:
                starts = (stream_seed(self.seed, "crop", axis, number) % (room + 1) for number in image_numbers)
                cut = [each.narrow(axis - 2, at, self.resolution) for each, at in zip(pixels, starts, strict=True)]
                pixels = torch.stack(cut)
        return pixels


# Of the values of EXIF's orientation: as PIL's ImageOps.exif_transpose, which fails if it cannot write other tags again.
_TURNED: dict[Any, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # indices of PIL.Image.Transpose


def decode(cell: Any) -> Image:
    """The image in a cell of an undecoded `datasets.Image` column (`{"bytes": ..., "path": ...}`), fully loaded."""
    from PIL import Image as images

    if not cell or (cell["bytes"] is None and cell["path"] is None):
        raise LabError("its cell in the dataset is empty.")
    data, path = cell["bytes"], cell["path"]
    image_endings()  # registers the plug-ins of PIL in this process
    try:
        if data is None and "://" in path:
            from datasets.utils.file_utils import xopen

            with xopen(path, "rb") as file:
                data = file.read()
        image = images.open(path if data is None else io.BytesIO(data))
        image.load()
    except images.UnidentifiedImageError:  # its text holds a memory address
        raise LabError("PIL does not know its format.") from None
    except Exception as error:  # decoders raise many types for damaged files
        if is_out_of_memory(error):
            raise
        raise LabError(f"{str(error) or type(error).__name__}.") from None
    with suppress(Exception):  # of damaged tags
        if (turned := _TURNED.get(image.getexif().get(0x0112))) is not None:
            return image.transpose(images.Transpose(turned))
    return image


def _levels(image: Image, channels: int) -> torch.Tensor:
    """An image of 8 bits as uint8 `(channels, height, width)`: transparency becomes white, and colour grey by PIL's luma."""
    if image.has_transparency_data:
        from PIL import Image as images

        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:
        image = image.convert("RGB").convert(mode)  # not every mode converts to grey
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def _deep_pixels(image: Image, channels: int) -> torch.Tensor:
    """
    An image of 16 bits, integers or floats as float32 `(channels, height, width)` in [0, 1]; a `LabError` for values without
    a known scale.
    """
    # PIL's conversion of 16-bit images clips at 255; some formats open as "I".
    largest = 1 if image.mode == "F" else 65535
    pixels = torch.from_numpy(np.asarray(image).astype(np.float32))[None]
    if not (pixels.min() >= 0 and pixels.max() <= largest):
        raise LabError(
            f"An image of mode {image.mode!r} has values from {pixels.min():g} to {pixels.max():g}; only "
            f"[0, {largest}] has a known meaning. Rescale it, or save it as an 8- or 16-bit image."
        )
    pixels /= largest
    return pixels.expand(channels, -1, -1)
