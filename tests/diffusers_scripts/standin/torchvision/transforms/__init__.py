"""Transforms of PIL images and of tensors."""

import enum
import random

import numpy as np
import torch

from . import functional


class InterpolationMode(enum.Enum):
    NEAREST, BILINEAR, BICUBIC, LANCZOS = "nearest", "bilinear", "bicubic", "lanczos"


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    def __init__(self, lambd):
        self.lambd = lambd

    def __call__(self, image):
        return self.lambd(image)


class Resize:
    def __init__(self, size, interpolation=InterpolationMode.BILINEAR):
        self.size, self.interpolation = size, getattr(interpolation, "value", interpolation)

    def __call__(self, image):
        return functional.resize(image, self.size, self.interpolation)


class CenterCrop:
    def __init__(self, size):
        self.size = functional.pair(size)

    def __call__(self, image):
        height, width = functional.size_of(image)
        return functional.crop(image, (height - self.size[0]) // 2, (width - self.size[1]) // 2, *self.size)


class RandomCrop(CenterCrop):
    @staticmethod
    def get_params(image, output_size):
        height, width = functional.size_of(image)
        top, left = (random.randint(0, most) for most in (height - output_size[0], width - output_size[1]))
        return top, left, *output_size

    def __call__(self, image):
        return functional.crop(image, *self.get_params(image, self.size))


class RandomHorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return functional.hflip(image) if torch.rand(1).item() < self.p else image


class PILToTensor:
    def __call__(self, image):
        pixels = torch.from_numpy(np.array(image))
        return (pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1)


class ToTensor(PILToTensor):
    def __call__(self, image):
        return super().__call__(image).float() / 255


class ConvertImageDtype:
    """From bytes to numbers in [0, 1]."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, image):
        return image.to(self.dtype) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(value).view(-1, 1, 1) for value in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
