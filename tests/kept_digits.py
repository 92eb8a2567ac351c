"""The digits, on which most runs train: encoded as a `datasets.Dataset`, and each of them decoded, once in a process.

A run of ten updates takes half of its time for that. The code is that of the package, and so are the values.
"""

import functools

from diffusers_lrlab.data import images, sources


def keep_digits():
    """From now on, in this process."""
    load, read = sources.load_image_dataset, images.ImageTransform.read

    @functools.cache
    def digits():
        from datasets import Image

        dataset = load("digits", resolution=None)
        return dataset, {cell["bytes"] for cell in dataset.cast_column("image", Image(decode=False))["image"]}

    def load_image_dataset(name, **how):
        return digits()[0] if (name, how) == ("digits", {"resolution": None}) else load(name, **how)

    decoded = {}

    def read_kept(transform, cell):
        if not digits.cache_info().currsize or not cell or cell["bytes"] not in digits()[1]:
            return read(transform, cell)
        key = (cell["bytes"], transform.resolution, transform.channels, transform.eight_bit)
        if key not in decoded:
            decoded[key] = read(transform, cell)
        return decoded[key].clone()

    sources.load_image_dataset = load_image_dataset
    images.ImageTransform.read = read_kept


def decode_digits():
    """Decodes all of them as most runs do."""
    from datasets import Image

    transform = images.ImageTransform(8, 1, center_crop=False, random_flip=False, eight_bit=False, seed=0)
    for cell in sources.load_image_dataset("digits", resolution=None).cast_column("image", Image(decode=False))["image"]:
        transform.read(cell)
