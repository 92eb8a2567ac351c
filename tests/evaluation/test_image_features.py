"""Features of embedded image sets, by a classifier that is trained on the spot."""

import numpy as np
import pytest
import torch

from diffusers_lrlab.data.image_sets import IMAGE_DATASETS, load_image_dataset
from diffusers_lrlab.data.images import normalise
from diffusers_lrlab.evaluation.frechet import frechet_distance, image_features


def tensors(dataset):
    images = np.stack([np.asarray(image) for image in dataset["image"]])
    images = images[..., None] if images.ndim == 3 else images
    return normalise(torch.from_numpy(images).permute(0, 3, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_DATASETS)
def test_real_images_are_nearer_than_blurred_and_random_ones(name):
    is_made = "made" in IMAGE_DATASETS[name].traits
    dataset = load_image_dataset(name, n=600 if is_made else None, resolution=16 if is_made else None)
    images = tensors(dataset)[torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:600]]
    features = image_features(name)
    real, other = features(images[:300]), features(images[300:])
    assert real.shape == (300, 32)
    blurred = features(torch.nn.functional.avg_pool2d(images[300:], 3, stride=1, padding=1))
    noise = features(torch.rand(300, *images.shape[1:], generator=torch.Generator().manual_seed(1)) * 2 - 1)
    nearest = frechet_distance(real, other)
    assert nearest < 0.5 * frechet_distance(real, blurred)
    assert nearest < 0.1 * frechet_distance(real, noise)
    assert name in features.description
