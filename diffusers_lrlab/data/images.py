"""Image files to tensors in [-1, 1], by PIL and torch.

Handles every mode: grey, colour, palette, transparent (on white), 16-bit and float. Precision is kept unless 8 bits are
requested.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.errors import LabError, is_out_of_memory
from ..core.streams import stream_seed, stream_uniform

if TYPE_CHECKING:
    from PIL.Image import Image


_LONGEST_SIDE = 16_384  # pixels; longer strips are taken for damaged images


def normalise(images: torch.Tensor) -> torch.Tensor:
    """8-bit levels as float32 in [-1, 1], with the same bits on every device; other tensors are unchanged."""
    if images.dtype != torch.uint8:
        return images
    # For a number CUDA multiplies by the reciprocal, which rounds differently from a division by a tensor.
    return images.float().div_(torch.full((), 255.0, device=images.device)).mul_(2).sub_(1)


def to_unit_tensor(image: Image, channels: int) -> torch.Tensor:
    """
    A PIL image of any mode as float32 of shape `(channels, height, width)` in [0, 1].

    Transparency becomes white, CMYK and similar modes become RGB, and for one channel colour becomes grey by PIL's luma.
    Raises a `LabError` for a float or integer image whose values have no known scale.
    """
    if not is_deep(image):
        return as_levels(plain_image(image, channels)).float() / 255
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


def is_deep(image: Image) -> bool:
    """Whether an image has more than 8 bits per channel."""
    return image.mode.startswith("I") or image.mode == "F"


def plain_image(image: Image, channels: int) -> Image:
    """An 8-bit image without transparency, in grey or RGB."""
    if image.has_transparency_data:
        from PIL import Image as images

        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    if image.mode == ("L" if channels == 1 else "RGB"):
        return image
    image = image.convert("RGB")  # also before grey, since not every mode converts to grey
    return image.convert("L") if channels == 1 else image


def as_levels(image: Image) -> torch.Tensor:
    """A plain image as uint8 `(channels, height, width)`."""
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


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
        """The resized image in a cell of an undecoded `datasets.Image` column; a `LabError` that names a corrupt one."""
        return normalise(self.read_compact(cell))

    def read_compact(self, cell: Any) -> torch.Tensor:
        """`read` before [`normalise`]: 8-bit levels where nothing is lost."""
        try:
            return self.resize_compact(decode(cell))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            raise LabError(
                f"The image {name!r} cannot be read: {error} Replace or remove it, or pass --skip_corrupt_images."
            ) from None

    def resize_compact(self, image: Image) -> torch.Tensor:
        """
        An image with its shorter side at `resolution`, which [`normalise`] makes float32 `(channels, height, width)` in
        [-1, 1].
        """
        size = self._size(image)
        is_resized = image.size != (size[1], size[0])
        if not (is_deep(image) or is_resized):
            return as_levels(plain_image(image, self.channels)).contiguous()
        pixels = to_unit_tensor(image, self.channels)
        if self.eight_bit:
            pixels = (pixels * 255).round() / 255
        if is_resized:
            pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
        return (pixels * 2 - 1).contiguous()

    def _size(self, image: Image) -> tuple[int, int]:
        """Height and width after resizing."""
        width, height = image.size
        scale = self.resolution / min(height, width)
        size = (max(self.resolution, round(height * scale)), max(self.resolution, round(width * scale)))
        if max(size) > _LONGEST_SIDE and max(size) > 100 * min(size):
            raise LabError(f"it has {width}x{height} pixels, a strip that would have {size[1]}x{size[0]} once resized.")
        return size

    def augment(self, pixels: torch.Tensor, image_number: int) -> torch.Tensor:
        """The random part of the transform: a square crop of a resized image, possibly flipped."""
        return self.augment_all(pixels[None], [image_number])[0]

    def augment_all(self, pixels: torch.Tensor, image_numbers: Sequence[int]) -> torch.Tensor:
        """`augment` for several images of one size."""
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


def decode(cell: Any) -> Image:
    """The image in a cell of an undecoded `datasets.Image` column (`{"bytes": ..., "path": ...}`), fully loaded."""
    from PIL import Image as images

    from .image_folder import image_endings

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
    turned = _TURNED.get(_orientation(image))
    return image if turned is None else image.transpose(images.Transpose(turned))


# Of the values of EXIF's orientation: as PIL's ImageOps.exif_transpose, which also writes the EXIF data again.
_TURNED: dict[Any, int] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # indices of PIL.Image.Transpose


def _orientation(image: Image) -> Any:
    """The orientation in the EXIF or XMP data of a loaded image, whose other tags may be damaged."""
    for read in (lambda: image.getexif().get(0x0112), lambda: _orientation_in(image.info["exif"])):
        with suppress(Exception):
            if value := read():
                return value
    return None


def _orientation_in(exif: bytes) -> Any:
    """The orientation in EXIF data, where PIL does not get past a damaged tag before it."""
    data = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}[data[:2]]
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (number,) = struct.unpack_from(f"{order}H", data, start)
    for tag, kind, _, value in struct.iter_unpack(f"{order}HHI4s", data[start + 2 :][: 12 * number]):
        if tag == 0x0112:
            return struct.unpack_from(order + {3: "H", 4: "I"}[kind], value)[0]
    return None
