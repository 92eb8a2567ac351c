"""The functions behind the transforms."""

import torch
from PIL import Image, ImageOps


def pair(size):
    return (size, size) if isinstance(size, int) else tuple(size)


def size_of(image):
    return image.shape[-2:] if isinstance(image, torch.Tensor) else image.size[::-1]


def resize(image, size, interpolation="bilinear"):
    """An integer is the length of the shorter side."""
    height, width = size_of(image)
    scale = size / min(height, width) if isinstance(size, int) else None
    height, width = (round(height * scale), round(width * scale)) if scale else size
    if isinstance(image, torch.Tensor):
        mode = {"bilinear": "bilinear", "bicubic": "bicubic"}.get(str(interpolation), "nearest")
        return torch.nn.functional.interpolate(image[None], (height, width), mode=mode)[0]
    return image.resize((width, height), getattr(Image.Resampling, str(interpolation).upper(), Image.Resampling.BILINEAR))


def crop(image, top, left, height, width):
    if isinstance(image, torch.Tensor):
        return image[..., top : top + height, left : left + width]
    return image.crop((left, top, left + width, top + height))


def hflip(image):
    return image.flip(-1) if isinstance(image, torch.Tensor) else ImageOps.mirror(image)
