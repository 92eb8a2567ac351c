"""Latents: images encoded once by an autoencoder, through `datasets.map`, and their rows as training data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.environment import available_cores
from ..core.errors import LabError, is_first_process, must_be
from ..core.files import expanded, new_folder
from ..core.manifest import MANIFEST, file_sums, find_damage
from ..core.options import check_needs, check_ranges
from ..core.streams import stream_generator, stream_uniform
from ..core.values import COUNT
from . import latents
from .image_sets import IMAGE_DATASETS, image_set
from .images import ImageTransform, decode, normalise
from .labels import find_label_column
from .loading import TrainingData, find_image_column, table_data
from .options import DataConfig
from .sources import open_dataset
from .toy2d import TOY_DATASETS


def encode_dataset(
    config: DataConfig,
    folder: Path,
    *,
    vae: str,
    subfolder: str | None = None,
    revision: str | None = None,
    flip: bool = False,
    batch_size: int = 16,
) -> latents.LatentsRecord:
    """Encodes all images of a data set into a new folder, which appears once it is whole."""
    name = config.dataset_name or ""
    check_ranges(config, DataConfig)
    check_needs(config, DataConfig, "images")
    COUNT.check("--batch_size", batch_size, "images that are encoded at once")
    if name in TOY_DATASETS or latents.latents_folder(config) is not None:
        hint = f"it has points or latents; images that need no download are {', '.join(IMAGE_DATASETS)}"
        raise must_be("the data set", name, "a data set of images", hint)
    embedded = image_set(name)
    own_resolution = 256 if embedded is None else embedded.facts["defaults"]["resolution"]
    with new_folder(expanded(folder)) as temporary:
        source = latents.find_autoencoder(vae, subfolder, revision, config.cache_dir)
        model = latents.load_autoencoder(source, config.cache_dir)
        encoder = _Encoder(model, config.resolution or own_resolution, flip)
        num_images = _encode(config, encoder, batch_size, temporary / latents.ROWS_FILE)
        record = latents.LatentsRecord(
            autoencoder=source._asdict(),
            **latents.identity_of(model),
            shape=encoder.shape,
            flip=flip,
            dataset=name,
            resolution=encoder.transform.resolution,
            image_channels=encoder.transform.channels,
            label_column=config.label_column,
            num_images=num_images,
        )
        record.write(temporary)
    return record


def _encode(config: DataConfig, encoder: _Encoder, batch_size: int, file: Path) -> int:
    """Writes the latents of all images, and their labels; returns the number of images."""
    import datasets as hf_datasets

    dataset = open_dataset(config)
    column = find_image_column(dataset, config.image_column)
    if not len(dataset):
        raise LabError(f"{config.dataset_name!r} has no images to encode.")
    of_labels = {}
    if (label := find_label_column(dataset, config)) is not None:
        label.read_all(dataset)  # which checks them
        of_labels = {label.name: dataset.features[label.name]}
    images = dataset.select_columns([column, *of_labels]).cast_column(column, hf_datasets.Image(decode=False))
    images.map(
        encoder,
        input_columns=column,
        batched=True,
        batch_size=batch_size,
        writer_batch_size=100,  # rows, which may have megabytes each
        remove_columns=[column],
        features=hf_datasets.Features({"latent": hf_datasets.Value("binary"), **of_labels}),
        load_from_cache_file=False,
        cache_file_name=str(file),
        new_fingerprint="latents",  # otherwise it would hash the autoencoder
        desc="encode",
    )
    return len(images)


class _Encoder:
    """The latents of a batch of undecoded images, as bytes of float32."""

    def __init__(self, model: Any, resolution: int, flip: bool):
        has_device = torch.accelerator.is_available()
        self.device = torch.accelerator.current_accelerator() if has_device else torch.device("cpu")
        self.model, self.flip, channels = model.to(self.device), flip, getattr(model.config, "in_channels", 3)
        self.transform = ImageTransform(resolution, channels, center_crop=True, random_flip=False, eight_bit=False, seed=0)
        self.shape = self._tried_shape()
        self._pool = ThreadPoolExecutor(available_cores())

    @torch.no_grad()
    def _tried_shape(self) -> tuple[int, int, int]:
        """The shape of the latent of an empty image, which is decoded as well; a `LabError` if the size does not fit."""
        images = torch.zeros(1, *self.transform.shape, device=self.device)
        name, size, wanted = "--resolution", self.transform.resolution, "a size that the autoencoder encodes and decodes"
        try:
            latent = self._encoded(images)[0]
            decoded = self.model.decode(latent, return_dict=False)[0].shape
        except Exception as error:  # of any type, as of layers that do not fit
            raise must_be(name, size, wanted, f"{error}") from error
        if decoded != images.shape:
            raise must_be(name, size, wanted, f"it would decode images to {' x '.join(map(str, decoded[1:]))}")
        return (*latent.shape[1:],)

    def _encoded(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Mean and standard deviation, or the mean alone of a deterministic autoencoder."""
        output = self.model.encode(images)
        return [output.latent_dist.mean, output.latent_dist.std] if hasattr(output, "latent_dist") else [output.latent]

    def _read(self, cell: Any) -> torch.Tensor:
        try:
            return self.transform.fixed(normalise(self.transform.resize(decode(cell))))
        except LabError as error:
            name = (cell and cell["path"]) or "(embedded bytes)"
            raise LabError(f"The image {name!r} cannot be read: {error} Replace or remove it.") from None

    @torch.no_grad()
    def __call__(self, cells: Any) -> dict[str, list[bytes]]:
        images = torch.stack(list(self._pool.map(self._read, cells))).to(self.device)
        parts = self._encoded(images)
        if self.flip:
            parts += self._encoded(images.flip(-1))
        rows = torch.stack(parts, dim=1).to("cpu", torch.float32).contiguous()
        return {"latent": [row.flatten().view(torch.uint8).numpy().tobytes() for row in rows]}


@dataclass(frozen=True)
class LatentTransform:
    """
    The transform from the bytes of a row to the latent that a model is trained on, float32 `(channels, height, width)`.

    Flip and draw depend on the seed of the run and the image number in it only, so they are the same for any number of
    workers, processes and micro-batches, and after a resume; in another epoch an image has another number.
    """

    record: latents.LatentsRecord
    seed: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.record.shape

    def read(self, cell: bytes) -> torch.Tensor:
        """Mean and standard deviation, and both of the mirrored image, as far as they are stored: `(parts, *shape)`."""
        return torch.frombuffer(bytearray(cell), dtype=torch.float32).view(-1, *self.shape)

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean, not flipped; `tensor` may have more dimensions in front."""
        return self._scaled(tensor.select(-4, 0))

    def augment(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Draws from mean and variance, of the mirrored image for half of the numbers if it was encoded."""
        return torch.stack([self._draw(tensor, number) for tensor, number in zip(tensors, numbers, strict=True)])

    def _draw(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        versions = tensor.view(1 + self.record.flip, -1, *self.shape)
        latent, *std = versions[int(self.record.flip and stream_uniform(self.seed, "flip", number) < 0.5)]
        if std:
            noise = torch.randn(self.shape, generator=stream_generator(self.seed, "latent", number))
            latent = latent + std[0] * noise
        return self._scaled(latent)

    def _scaled(self, latent: torch.Tensor) -> torch.Tensor:
        return (latent - self.record.shift_factor) * self.record.scaling_factor


def load_latent_data(config: DataConfig, seed: int) -> TrainingData:
    """Opens the latents of a resolved configuration, verifies them, and holds out the rows that a run on images would."""
    from datasets import Dataset

    folder = latents.latents_folder(config) or Path()
    if is_first_process() and (damage := find_damage(folder)):  # the others would read the same files
        raise LabError(f"{damage}. {latents.ENCODE_AGAIN}.")
    record = latents.read_latents_record(folder)
    dataset, fingerprint = Dataset.from_file(str(folder / latents.ROWS_FILE)), file_sums(folder / MANIFEST)["sha256"]
    data = table_data(config, seed, dataset, "latent", LatentTransform(record, seed), fingerprint)
    data.image_set = latents.image_set_of(config)
    data.autoencoder = {**record.autoencoder, "weights_sha256": record.weights_sha256}
    return data
