"""Encodes the images of a data set into shards of latents, from where a killed process left off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...core.environment import available_cores
from ...core.errors import LabError, must_be, warn
from ...core.files import atomic_file, check_new_folder, expanded
from ...core.lock import LOCK_FILES, locked
from ...core.manifest import file_sums
from ...core.ranges import COUNT, Range
from ...core.words import counted
from ...core.worker_process import end_with_parent
from ..image_loading import find_image_column, fingerprint_of
from ..image_sets import IMAGE_DATASETS, check_resolution, image_set
from ..images import ImageTransform, decode, normalise
from ..labels import KEYWORD, find_label_column
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
from .manifest import LatentsManifest, each_damaged_shard, is_latents_folder, read_latents_manifest

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RESOLUTION = 256  # pixels, of sets that have no size of their own
_MANY = 640  # images that are worth worker processes
_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")


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
    shard_size: int = 4096
    cache_dir: str | None = None


def encode_dataset(options: EncodeOptions, folder: Path) -> LatentsManifest:
    """
    Encodes all images of a data set into a folder, which is new or holds a part of the same latents.

    Each shard is written whole and listed in the manifest before the next is begun. The images of a shard are encoded in
    batches that begin with it, so a continued encode gives the same bits as an uninterrupted one.
    """
    _check_options(options)
    folder = expanded(folder)
    with locked(folder, "DIR"):
        if not is_latents_folder(folder):
            others = [path for path in folder.iterdir() if path.name not in LOCK_FILES]
            if others:
                check_new_folder(folder, "Give a new folder, or one that lrlab data encode made")
        source = find_autoencoder(options.vae, options.subfolder, options.revision, options.cache_dir)
        model = load_autoencoder(source, options.cache_dir)
        cells, labels, begun = _prepare(options, source, model)
        manifest = _continued(folder, begun)
        if not manifest.is_whole:
            if not manifest.shards:
                manifest.write(folder)
            manifest = _encode_rest(folder, manifest, model, cells, labels)
    return manifest


def _check_options(options: EncodeOptions) -> None:
    COUNT.check("--batch_size", options.batch_size, "images that are encoded at once")
    COUNT.check("--shard_size", options.shard_size, "images of a file")
    Range("[1, 16384]", whole=True).check("--resolution", options.resolution, "pixels of a side")
    if options.dtype not in DTYPES:
        raise must_be("--dtype", options.dtype, f"one of {', '.join(DTYPES)}", "float16 takes half the space")
    if options.dataset in TOY_DATASETS:
        hint = f"it has points; images that need no download are {', '.join(IMAGE_DATASETS)}"
        raise must_be("the data set", options.dataset, "a data set of images", hint)
    if (path := local_folder(options.dataset)) is not None and not expanded(path).is_dir():
        raise must_be("the data set", options.dataset, "a folder that exists, an image set or a Hub id", "check the path")
    if local_folder(options.dataset) is not None and is_latents_folder(options.dataset):
        raise must_be("the data set", options.dataset, "a data set of images", "it holds latents; train on it")
    if (embedded := image_set(options.dataset)) is not None and options.resolution is not None:
        check_resolution(embedded.name, options.resolution)
    if embedded is not None:
        for name in ("dataset_config_name", "image_column"):
            if getattr(options, name) is not None:
                raise must_be(f"--{name}", getattr(options, name), f"left out for {embedded.name!r}", "it has one")
        if options.dataset_split != "train":
            raise must_be("--dataset_split", options.dataset_split, f"left out for {embedded.name!r}", "it has one")


def _prepare(options: EncodeOptions, source: Any, model: Any) -> tuple[Any, torch.Tensor | None, LatentsManifest]:
    """Undecoded images, their labels, and the manifest of what is going to be encoded; checks all of them."""
    import datasets as hf_datasets

    embedded = image_set(options.dataset)
    own = embedded.facts["defaults"] if embedded is not None else {}
    resolution = options.resolution or own.get("resolution", _RESOLUTION)
    channels = image_channels_of(model, options.vae)
    shapes = check_size(model, options.vae, channels, resolution)
    names = ("dataset_config_name", "dataset_split", "image_column", "label_column", "cache_dir")
    config = DataConfig(
        dataset_name=options.dataset, resolution=resolution, **{name: getattr(options, name) for name in names}
    )
    dataset = open_dataset(config)
    column = find_image_column(dataset, options.image_column)
    if not len(dataset):
        raise LabError(f"{options.dataset!r} has no images to encode.")
    dataset = dataset.cast_column(column, hf_datasets.Image(decode=False))
    if channels == 1 and (own.get("image_channels") == 3 or _has_colour(dataset[0][column])):
        hint = f"the autoencoder {options.vae} takes grey ones; choose one of RGB images, or convert the images"
        raise must_be("the data set", options.dataset, "a data set of grey images", hint, got="images in colour")
    labels, class_names = _labels(dataset, config)
    scaling, shift = scaling_of(model)
    manifest = LatentsManifest(
        autoencoder=source._asdict(),
        weights_sha256=weights_sha256(model),
        scaling_factor=scaling,
        shift_factor=shift,
        shape=shapes["mean"],  # type: ignore[arg-type]
        is_deterministic="std" not in shapes,
        resolution=resolution,
        image_channels=channels,
        dtype=options.dtype,
        flip=options.flip,
        dataset={
            "name": options.dataset,
            "config": options.dataset_config_name,
            "split": options.dataset_split,
            "column": column,
            "fingerprint": fingerprint_of(config, dataset),
        },
        image_set=None if embedded is None else embedded.name,
        label_column=options.label_column,
        class_names=class_names,
        num_images=len(dataset),
        batch_size=options.batch_size,
        shard_size=options.shard_size,
    )
    return dataset[column], labels, manifest


def _has_colour(cell: Any) -> bool:
    try:
        return decode(cell).mode not in _GREY
    except LabError:
        return False  # an error when it is encoded, which names the file


def _labels(dataset: Any, config: DataConfig) -> tuple[torch.Tensor | None, list[str] | None]:
    """The labels of all rows, int64, and the names of classes if they are known."""
    if (column := find_label_column(dataset, config).get(KEYWORD)) is None:
        return None, None
    return column.read_all(dataset[column.name][:]), list(column.class_names) or None


def _continued(folder: Path, begun: LatentsManifest) -> LatentsManifest:
    """The manifest with the intact shards of the folder; a `LabError` if they are of other images or settings."""
    if not is_latents_folder(folder):
        return begun
    found = read_latents_manifest(folder)
    now, before = begun.settings, found.settings
    if differing := [name for name, value in now.items() if before[name] != value]:
        lines = "\n  ".join(f"{name}: {before[name]!r} then, {now[name]!r} now" for name in differing)
        raise LabError(f"{str(folder)!r} holds latents of other settings:\n  {lines}\nHint: give them, or a new folder.")
    whole = []
    for shard in found.shards:
        if damage := next(each_damaged_shard(folder, [shard]), None):
            warn(f"{damage}; it and the shards after it are encoded again.")
            break
        whole.append(shard)
    return dataclasses.replace(begun, shards=whole)


class _Images(Dataset[Any]):
    """Decoded images of undecoded cells; an error as text, since a worker would send it as a traceback."""

    def __init__(self, cells: Any, transform: ImageTransform):
        self.cells, self.transform = cells, transform

    def __getitem__(self, row: int) -> torch.Tensor | str:
        cell = self.cells[row]
        try:
            pixels = self.transform.resize_compact(decode(cell))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            return f"The image {name!r} in row {row} cannot be read: {error} Replace or remove it."
        return self.transform.fixed(normalise(pixels)).contiguous()


def _encode_rest(
    folder: Path, manifest: LatentsManifest, model: Any, cells: Any, labels: torch.Tensor | None
) -> LatentsManifest:
    from safetensors.torch import save_file
    from tqdm.auto import tqdm

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = model.to(device)
    shards, first = list(manifest.shards), manifest.num_encoded
    batches = _batches(manifest, cells, first)
    with tqdm(total=manifest.num_images, initial=first, desc="encode", unit="image", disable=None) as bar:
        for number, rows in _shards(manifest, first):
            parts: dict[str, list[torch.Tensor]] = {}
            for _ in range(0, len(rows), manifest.batch_size):
                images = next(batches)
                for name, values in _encoded_batch(model, images.to(device), manifest.flip).items():
                    parts.setdefault(name, []).append(values.cpu())
                bar.update(len(images))
            tensors = {name: torch.cat(values) for name, values in parts.items()}
            sums = _sums_of(tensors, manifest)
            stored = {name: values.to(DTYPES[manifest.dtype]).contiguous() for name, values in tensors.items()}
            _check_finite(stored, rows, manifest)
            if labels is not None:
                stored["label"] = labels[rows.start : rows.stop].clone()
            file = f"latents-{number:05}.safetensors"
            with atomic_file(folder / file) as temporary:
                save_file(stored, temporary)
            shards.append({"file": file, "num_images": len(rows), **file_sums(folder / file), **sums})
            manifest = dataclasses.replace(manifest, shards=list(shards))
            manifest.write(folder)
    return manifest


def _shards(manifest: LatentsManifest, first: int) -> Iterator[tuple[int, range]]:
    """Numbers and rows of the shards from row `first` on."""
    for start in range(first, manifest.num_images, manifest.shard_size):
        yield start // manifest.shard_size, range(start, min(start + manifest.shard_size, manifest.num_images))


def _batches(manifest: LatentsManifest, cells: Any, first: int) -> Iterator[torch.Tensor]:
    """Images in [-1, 1], batch by batch; none reaches from one shard into the next."""
    transform = ImageTransform(
        resolution=manifest.resolution,
        channels=manifest.image_channels,
        center_crop=True,
        random_flip=False,
        eight_bit=False,
        seed=0,
    )
    size = manifest.batch_size
    rows = [
        list(shard[start : start + size]) for _, shard in _shards(manifest, first) for start in range(0, len(shard), size)
    ]
    loader: DataLoader[Any] = DataLoader(
        _Images(cells, transform),
        batch_sampler=rows,
        collate_fn=list,
        num_workers=available_cores() - 1 if manifest.num_images - first >= _MANY else 0,
        worker_init_fn=end_with_parent,
        generator=torch.Generator(),
    )
    for images in loader:
        if problem := next((each for each in images if isinstance(each, str)), None):
            raise LabError(problem)
        yield torch.stack(images)


@torch.no_grad()
def _encoded_batch(model: Any, images: torch.Tensor, flip: bool) -> dict[str, torch.Tensor]:
    found = encoded(model, images)
    if flip:
        found |= {f"{name}_flipped": values for name, values in encoded(model, images.flip(-1)).items()}
    return found


def _sums_of(tensors: dict[str, torch.Tensor], manifest: LatentsManifest) -> dict[str, float]:
    """The sum and the sum of squares of scaled latents, expected over what training draws."""
    mean = (tensors["mean"].double() - manifest.shift_factor) * manifest.scaling_factor
    square = mean.square()
    if not manifest.is_deterministic:
        square = square + (tensors["std"].double() * manifest.scaling_factor).square()
    return {"sum": float(mean.sum()), "sum_of_squares": float(square.sum())}


def _check_finite(stored: dict[str, torch.Tensor], rows: range, manifest: LatentsManifest) -> None:
    for values in stored.values():
        finite = values.flatten(1).isfinite().all(dim=1)
        if not finite.all():
            row = rows[int((~finite).nonzero()[0])]
            wanted = "a type that can hold the latents" if manifest.dtype == "float16" else "finite latents"
            raise must_be("--dtype", manifest.dtype, wanted, "float32 and bfloat16 hold larger numbers", got=f"row {row}")


def summary(manifest: LatentsManifest) -> str:
    """What was encoded, and whether noise of standard deviation 1 suits it."""
    size, (mean, std) = sum(shard["size"] for shard in manifest.shards), manifest.statistics
    text = (
        f"{counted(manifest.num_images, 'image', ',')} of {manifest.resolution}x{manifest.resolution} pixels as latents of "
        f"{' x '.join(map(str, manifest.shape))}, {counted(len(manifest.shards), 'shard')}, {size / 2**20:,.1f} MiB. Scaled "
        f"by {manifest.scaling_factor:.5g}, they have mean {mean:.3g} and standard deviation {std:.3g}."
    )
    if not 0.5 <= std <= 2 and std > 0:
        text += (
            f"\nThe noise has a standard deviation of 1: set scaling_factor to {manifest.scaling_factor / std:.4g} in the "
            "config.json of the autoencoder, and encode again."
        )
    return text
