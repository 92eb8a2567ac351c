"""Folders of small images whose pixels are known, and configurations that read them."""

import dataclasses
import io
import tarfile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.options import DataConfig
from diffusers_lrlab.optimizers.build import check_installed
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.kinds import kind_of
from diffusers_lrlab.training.model import given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer


def numbered_image(number, size=(4, 4)):
    """A grey image of one level, by which it is known again."""
    return Image.new("L", size, number)


def png(number):
    """A [`numbered_image`] as the content of a file."""
    numbered_image(number).save(file := io.BytesIO(), "png")
    return file.getvalue()


def write_tar(path, members, mode="w"):
    """A tar file of names with contents, and the folder that it is in."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path.parent


def image_folder(folder, count=20, size=(4, 4)):
    """`count` PNGs of the levels 0, 1, 2, ..., spread over two subfolders that datasets takes for classes."""
    for number in range(count):
        path = folder / ("even" if number % 2 == 0 else "odd") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        numbered_image(number, size).save(path)
    return folder


def config(folder=None, **options):
    """A resolved configuration for small grey images; `folder` is where they are and a cache may be."""
    if folder is not None:
        small = {"resolution": 4, "image_channels": 1, "train_batch_size": 1, "num_validation_images": 0}
        options = {"train_data_dir": str(folder), "cache_dir": str(folder.parent / "cache"), **small, **options}
    return resolve_config(TrainingConfig(**options))


def load_data(config, num_processes=1):
    """The data of a resolved configuration."""
    return kind_of(config).load_data(config, num_processes)


def load_data_once(config):
    """Those of an embedded set, which share its tensors with others of the same configuration."""
    if not isinstance(config.dataset_name, str) or "/" in config.dataset_name:
        return load_data(config)
    names = [field.name for field in dataclasses.fields(DataConfig)]
    key = (config.seed, config.layout(1), config.num_validation_images, *(repr(getattr(config, name)) for name in names))
    if key not in _LOADED:
        _LOADED[key] = load_data(config)
    return dataclasses.replace(_LOADED[key], skipped=[], known={})


_LOADED = {}


def make_trainer(folder, options, model=None):
    """A trainer in this process with data that are loaded once; `model` is a configuration in the place of the run's own."""
    resolved = resolve_config(TrainingConfig(**options, output_dir=str(folder)))
    data = load_data_once(resolved)
    plan = make_plan(resolved, data, model or given_model_config(resolved))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=resolved.gradient_accumulation_steps)
    return Trainer(plan, data, accelerator, RunFolder(folder))


def load(folder=None, **options):
    """The data of [`config`]."""
    return load_data(config(folder, **options))


def levels(images):
    """The levels (0 to 255) of images in [-1, 1], a tensor or a batch, read at their first pixel."""
    return np.rint((images.data[:, 0, 0, 0].numpy() + 1) * 127.5).astype(int).tolist()


def stacked(batches):
    """The data of batches of one size: `(num_batches, batch, ...)`."""
    return torch.stack([batch.data for batch in batches])


def joined(batches):
    """The data of batches, one after the other."""
    return Batch.join(list(batches)).data


def seeded(seed=0):
    """A generator of torch."""
    return torch.Generator().manual_seed(seed)


def normal(seed, n, dimension=2):
    """Points of a standard normal distribution."""
    return np.random.default_rng(seed).normal(size=(n, dimension))


def is_installed(optimizer):
    """Whether the package of an optimizer of the registry is there."""
    try:
        check_installed(OPTIMIZERS[optimizer])
    except LabError:
        return False
    return True


def begins_soon(sampler):
    """The sampler by name, as a spec string whose density begins within a few updates: those that wait refuse short runs."""
    return f"{sampler}:num_bins=2,warmup_updates=2,refresh_every=1,min_count=1" if sampler == "infonoise" else sampler
