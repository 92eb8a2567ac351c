"""Latents as training data: rows of a memory-mapped file, and the draw of a latent from its mean and variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.errors import is_first_process
from ...core.streams import stream_generator, stream_uniform
from ..batch import Batch
from ..conditions import find_conditions, fingerprint_with
from ..labels import find_label_column
from ..layout import BatchLayout
from ..loading import TrainingData, hold_out_rows, select_columns
from ..options import DataConfig
from .manifest import ROWS_FILE, check_rows, latents_folder, read_latents_manifest


@dataclass(frozen=True)
class LatentTransform:
    """
    The transform from the bytes of a row to the latent that a model is trained on, float32 `(channels, height, width)`.

    Flip and draw depend on the seed and the image number in the run only, so they are the same for any number of workers,
    processes and micro-batches, and after a resume; in another epoch an image has another number.
    """

    shape: tuple[int, ...]
    dtype: str
    scaling_factor: float
    shift_factor: float
    has_std: bool
    has_flips: bool
    seed: int  # of the run

    def read(self, cell: bytes) -> torch.Tensor:
        """Mean and standard deviation, and both of the mirrored image, as far as they are stored: `(parts, *shape)`."""
        return torch.frombuffer(bytearray(cell), dtype=getattr(torch, self.dtype)).view(-1, *self.shape)

    read_compact = read

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean, not flipped; `tensor` may have more dimensions in front."""
        return self._scaled(tensor.select(-4, 0).float())

    def augment(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A draw from mean and variance, of the mirrored image for half of the numbers if it was encoded."""
        is_flipped = self.has_flips and stream_uniform(self.seed, "flip", number) < 0.5
        first = (1 + self.has_std) * is_flipped
        latent = tensor[first].float()
        if self.has_std:
            noise = torch.randn(self.shape, generator=stream_generator(self.seed, "latent", number))
            latent = latent + tensor[first + 1].float() * noise
        return self._scaled(latent)

    def augment_all(self, tensors: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.augment(tensor, number) for tensor, number in zip(tensors, numbers, strict=True)])

    def _scaled(self, latents: torch.Tensor) -> torch.Tensor:
        return (latents - self.shift_factor) * self.scaling_factor


def load_latent_data(
    config: DataConfig, seed: int, layout: BatchLayout, conditions: Mapping[str, str] | None = None
) -> TrainingData:
    """
    Opens the latents of a resolved configuration, verifies them, and holds out the rows that a run on the images would.

    `conditions` are those of [`load_image_data`]; latents have one column, that of their labels.
    """
    folder = latents_folder(config) or Path(config.train_data_dir or config.dataset_name or "")
    manifest = read_latents_manifest(folder)
    if is_first_process():  # the others would read the same file
        check_rows(folder, manifest)
    manifest.check_label_column("--label_column", config.label_column)
    from datasets import Dataset

    rows = Dataset.from_file(str(folder / ROWS_FILE))
    columns = find_conditions(rows, conditions) | find_label_column(rows, config)
    rows, values = select_columns(rows, "latent", columns, is_stream=False)
    transform = LatentTransform(
        shape=manifest.shape,
        dtype=manifest.dtype,
        scaling_factor=manifest.scaling_factor,
        shift_factor=manifest.shift_factor,
        has_std=not manifest.is_deterministic,
        has_flips=manifest.flip,
        seed=seed,
    )
    name, fingerprint = config.dataset_name or config.train_data_dir or "", fingerprint_with(manifest.fingerprint, values)
    data = TrainingData(name, rows, Batch(torch.empty(0)), "latent", fingerprint, transform)
    data.image_set = manifest.image_set
    data.autoencoder = {**manifest.autoencoder, "weights_sha256": manifest.weights_sha256}
    hold_out_rows(data, config, columns, values, seed)
    layout.check_fits(len(data.train))
    return data
