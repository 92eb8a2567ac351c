"""The transforms of PIL images, and of the tensors that they become, that the scripts use."""

import enum
import random

import numpy as np
import torch
from PIL import Image, ImageOps

from .functional import crop


class InterpolationMode(enum.Enum):
    NEAREST, BILINEAR, BICUBIC, LANCZOS = "nearest", "bilinear", "bicubic", "lanczos"


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def Lambda(function):
    return function


class Resize:
    def __init__(self, size, interpolation=InterpolationMode.BILINEAR):
        self.size, self.resampling = size, getattr(Image.Resampling, interpolation.name)  # of the shorter side

    def __call__(self, image):
        scale = self.size / min(image.size)
        return image.resize(tuple(round(length * scale) for length in image.size), self.resampling)


class CenterCrop:
    def __init__(self, size):
        self.size = (size, size)

    def __call__(self, image):
        width, height = image.size
        return crop(image, (height - self.size[0]) // 2, (width - self.size[1]) // 2, *self.size)


class RandomCrop(CenterCrop):
    @staticmethod
    def get_params(image, output_size):
        width, height = image.size
        return random.randint(0, height - output_size[0]), random.randint(0, width - output_size[1]), *output_size

    def __call__(self, image):
        return crop(image, *self.get_params(image, self.size))


class RandomHorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return ImageOps.mirror(image) if torch.rand(1).item() < self.p else image


class PILToTensor:
    def __call__(self, image):
        pixels = torch.from_numpy(np.array(image))
        return (pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


class ToTensor(PILToTensor):
    def __call__(self, image):
        return super().__call__(image).float() / 255


def ConvertImageDtype(dtype):
    return lambda image: image.to(dtype) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(value).view(-1, 1, 1) for value in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
