"""Encodes the images of a data set by `datasets.map`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.environment import available_cores
from ...core.errors import LabError, must_be
from ...core.files import expanded, new_folder
from ...core.manifest import file_sums
from ...core.ranges import COUNT, Range
from ...core.words import counted
from ..conditions import read_conditions
from ..image_loading import find_image_column
from ..image_sets import IMAGE_DATASETS, check_resolution, image_set
from ..images import ImageTransform, decode, normalise
from ..labels import find_label_column
from ..options import DataConfig
from ..sources import local_folder, open_dataset
from ..toy2d_entries import TOY_DATASETS
from .autoencoder import (
    check_size,
    encoded,
    find_autoencoder,
    image_channels_of,
    load_autoencoder,
    scaling_of,
    weights_sha256,
)
from .manifest import ROWS_FILE, LatentsManifest, is_latents_folder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RESOLUTION = 256  # pixels, of sets that have no size of their own


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """The options of `lrlab data encode`, which describes them."""

    dataset: str
    vae: str
    subfolder: str | None = None
    revision: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str = "train"
    image_column: str | None = None
    label_column: str | None = None
    resolution: int | None = None
    flip: bool = False
    dtype: str = "float32"
    batch_size: int = 16
    cache_dir: str | None = None


def encode_dataset(options: EncodeOptions, folder: Path) -> LatentsManifest:
    """Encodes all images of a data set into a new folder, which appears once it is whole."""
    _check_options(options)
    with new_folder(expanded(folder)) as temporary:
        source = find_autoencoder(options.vae, options.subfolder, options.revision, options.cache_dir)
        model = load_autoencoder(source, options.cache_dir)
        embedded = image_set(options.dataset)
        own = embedded.facts["defaults"]["resolution"] if embedded is not None else _RESOLUTION
        resolution, channels = options.resolution or own, image_channels_of(model, options.vae)
        shape, is_deterministic = check_size(model, options.vae, channels, resolution)
        transform = ImageTransform(resolution, channels, center_crop=True, random_flip=False, eight_bit=False, seed=0)
        encoder = _Encoder(model, transform, options)
        num_images = _encode(options, encoder, temporary)
        mean = encoder.total / encoder.count
        manifest = LatentsManifest(
            autoencoder=source._asdict(),
            weights_sha256=weights_sha256(model),
            scaling_factor=encoder.scaling,
            shift_factor=encoder.shift,
            shape=shape,
            is_deterministic=is_deterministic,
            flip=options.flip,
            dtype=options.dtype,
            dataset=options.dataset,
            resolution=resolution,
            image_channels=channels,
            image_set=None if embedded is None else embedded.name,
            label_column=options.label_column,
            num_images=num_images,
            mean=mean,
            std=max(0.0, encoder.total_of_squares / encoder.count - mean**2) ** 0.5,
            rows=file_sums(temporary / ROWS_FILE),
        )
        manifest.write(temporary)
    return manifest


def _check_options(options: EncodeOptions) -> None:
    COUNT.check("--batch_size", options.batch_size, "images that are encoded at once")
    Range("[1, 16384]", whole=True).check("--resolution", options.resolution, "pixels of a side")
    if options.dtype not in DTYPES:
        raise must_be("--dtype", options.dtype, f"one of {', '.join(DTYPES)}", "float16 takes half the space")
    if options.dataset in TOY_DATASETS:
        hint = f"it has points; images that need no download are {', '.join(IMAGE_DATASETS)}"
        raise must_be("the data set", options.dataset, "a data set of images", hint)
    if (path := local_folder(options.dataset)) is not None and not expanded(path).is_dir():
        raise must_be("the data set", options.dataset, "a folder that exists, an image set or a Hub id", "check the path")
    if path is not None and is_latents_folder(path):
        raise must_be("the data set", options.dataset, "a data set of images", "it holds latents; train on it")
    if (embedded := image_set(options.dataset)) is None:
        return
    if options.resolution is not None:
        check_resolution(embedded.name, options.resolution)
    for name, only in (("dataset_config_name", None), ("image_column", None), ("dataset_split", "train")):
        if getattr(options, name) != only:
            raise must_be(f"--{name}", getattr(options, name), f"left out for {embedded.name!r}", "it has one")


def _encode(options: EncodeOptions, encoder: _Encoder, folder: Path) -> int:
    """Writes the latents of all images, and their labels; returns the number of images."""
    import datasets as hf_datasets

    names = ("dataset_config_name", "dataset_split", "image_column", "label_column", "cache_dir")
    given = {name: getattr(options, name) for name in names}
    config = DataConfig(dataset_name=options.dataset, resolution=encoder.transform.resolution, **given)
    dataset = open_dataset(config)
    column = find_image_column(dataset, options.image_column)
    if not len(dataset):
        raise LabError(f"{options.dataset!r} has no images to encode.")
    labels = find_label_column(dataset, config)
    read_conditions(dataset, labels)  # which checks them
    of_labels = {each.name: dataset.features[each.name] for each in labels.values()}
    images = dataset.select_columns([column, *of_labels]).cast_column(column, hf_datasets.Image(decode=False))
    images.map(
        encoder,
        input_columns=column,
        with_indices=True,
        batched=True,
        batch_size=options.batch_size,
        writer_batch_size=100,  # rows, which may have megabytes each
        remove_columns=[column],
        features=hf_datasets.Features({"latent": hf_datasets.Value("binary"), **of_labels}),
        load_from_cache_file=False,
        cache_file_name=str(folder / ROWS_FILE),
        new_fingerprint="latents",  # otherwise it would hash the autoencoder
        desc="encode",
    )
    return len(images)


class _Encoder:
    """The latents of a batch of undecoded images, as bytes; counts and sums those that training draws."""

    def __init__(self, model: Any, transform: ImageTransform, options: EncodeOptions):
        has_device = torch.accelerator.is_available()
        device = torch.accelerator.current_accelerator() if has_device else torch.device("cpu")
        self.model, self.device, self.transform, self.options = model.to(device), device, transform, options
        self.scaling, self.shift = scaling_of(model)
        self.count, self.total, self.total_of_squares = 0, 0.0, 0.0
        self._pool = ThreadPoolExecutor(available_cores())

    @torch.no_grad()
    def __call__(self, cells: Any, rows: list[int]) -> dict[str, list[bytes]]:
        images = torch.stack(list(self._pool.map(self._read, cells, rows))).to(self.device)
        parts = encoded(self.model, images)
        self._add(*(part.cpu().double() for part in parts))
        if self.options.flip:
            parts += encoded(self.model, images.flip(-1))
        latents = torch.stack(parts, dim=1).to("cpu", DTYPES[self.options.dtype]).contiguous()
        self._check_finite(latents, rows)
        return {"latent": [each.flatten().view(torch.uint8).numpy().tobytes() for each in latents]}

    def _read(self, cell: Any, row: int) -> torch.Tensor:
        try:
            pixels = self.transform.resize_compact(decode(cell))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            raise LabError(f"The image {name!r} in row {row} cannot be read: {error} Replace or remove it.") from None
        return self.transform.fixed(normalise(pixels))

    def _add(self, mean: torch.Tensor, std: torch.Tensor | None = None) -> None:
        scaled = (mean - self.shift) * self.scaling
        squares = scaled.square() if std is None else scaled.square() + (std * self.scaling).square()
        self.count += scaled.numel()
        self.total += float(scaled.sum())
        self.total_of_squares += float(squares.sum())

    def _check_finite(self, latents: torch.Tensor, rows: list[int]) -> None:
        finite = latents.flatten(1).isfinite().all(dim=1)
        if not finite.all():
            dtype, row = self.options.dtype, rows[int((~finite).nonzero()[0])]
            wanted = "a type that can hold the latents" if dtype == "float16" else "finite latents"
            raise must_be("--dtype", dtype, wanted, "float32 and bfloat16 hold larger numbers", got=f"row {row}")


def summary(manifest: LatentsManifest) -> str:
    """What was encoded, and whether noise of standard deviation 1 suits it."""
    text = (
        f"{counted(manifest.num_images, 'image', ',')} of {manifest.resolution}x{manifest.resolution} pixels as latents of "
        f"{' x '.join(map(str, manifest.shape))}, {manifest.rows['size'] / 2**20:,.1f} MiB. Scaled by "
        f"{manifest.scaling_factor:.5g}, they have mean {manifest.mean:.3g} and standard deviation {manifest.std:.3g}."
    )
    if not 0.5 <= manifest.std <= 2 and manifest.std > 0:
        text += (
            f"\nThe noise has a standard deviation of 1: set scaling_factor to {manifest.scaling_factor / manifest.std:.4g} "
            "in the config.json of the autoencoder, and encode again."
        )
    return text
