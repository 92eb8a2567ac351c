"""Latents as training data: rows of memory-mapped shards, and the draw of a latent from its mean and variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.errors import is_first_process
from ...core.streams import split_rows, stream_generator, stream_uniform
from ..batch import Batch
from ..conditions import ConditionColumns, fingerprint_with
from ..labels import find_classes, label_column
from ..layout import BatchLayout
from ..loading import TrainingData
from ..options import DataConfig
from .manifest import LatentsManifest, check_shards, check_whole, latents_folder, read_latents_manifest


class LatentRows(Sequence[torch.Tensor]):
    """
    Rows of the shards of a folder: `(parts, channels, height, width)` each, as stored, see [`LatentsManifest.parts`].

    Shards are memory-mapped, and opened again by each worker.
    """

    def __init__(self, folder: Path, manifest: LatentsManifest, rows: Sequence[int]):
        self.folder, self.manifest, self.rows = folder, manifest, np.asarray(rows, np.int64)
        self._ends = np.cumsum([shard["num_images"] for shard in manifest.shards])
        self._opened: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = int(self.rows[index])
        shard = int(np.searchsorted(self._ends, row, side="right"))
        position = row - int(self._ends[shard - 1] if shard else 0)
        if shard not in self._opened:
            file = _open(self.folder / self.manifest.shards[shard]["file"])
            self._opened[shard] = [file.get_slice(name) for name in self.manifest.parts]
        return torch.stack([part[position] for part in self._opened[shard]])

    def labels(self) -> torch.Tensor:
        """The labels of these rows, int64."""
        files = [_open(self.folder / shard["file"]) for shard in self.manifest.shards]
        return torch.cat([file.get_tensor("label") for file in files])[torch.from_numpy(self.rows)]

    def __getstate__(self) -> Any:
        return (self.folder, self.manifest, self.rows)

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, "pt")


@dataclass(frozen=True)
class LatentTransform:
    """
    The transform from a stored row to the latent that a model is trained on, float32 `(channels, height, width)`.

    Flip and draw depend on the seed and the image number in the run only, so they are the same for any number of workers,
    processes and micro-batches, and after a resume; in another epoch an image has another number.
    """

    shape: tuple[int, ...]
    scaling_factor: float
    shift_factor: float
    has_std: bool
    has_flips: bool
    seed: int  # of the run

    def read(self, cell: torch.Tensor) -> torch.Tensor:
        return cell

    def read_compact(self, cell: torch.Tensor) -> torch.Tensor:
        return cell

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
    conditions = conditions or {}
    folder = latents_folder(config) or Path(config.train_data_dir or config.dataset_name or "")
    manifest = read_latents_manifest(folder)
    check_whole(folder, manifest)
    if is_first_process():  # the others would read the same files
        check_shards(folder, manifest)
    for keyword, name in conditions.items():
        manifest.check_label_column(keyword, name, of="conditions")
    manifest.check_label_column("--label_column", config.label_column)
    names = manifest.class_names or ()
    columns = {} if config.label_column is None else label_column(config.label_column, names, config)
    held_out, training = split_rows(manifest.num_images, config.num_validation_images or 0)
    transform = LatentTransform(
        shape=manifest.shape,
        scaling_factor=manifest.scaling_factor,
        shift_factor=manifest.shift_factor,
        has_std=not manifest.is_deterministic,
        has_flips=manifest.flip,
        seed=seed,
    )
    keywords = [*conditions, *columns]
    values = dict.fromkeys(keywords, _read_labels(folder, manifest, columns)) if keywords else {}
    held = LatentRows(folder, manifest, held_out)
    means = [transform.fixed(held[index]) for index in range(len(held))]
    data = TrainingData(
        name=config.dataset_name or config.train_data_dir or "",
        train=(rows := LatentRows(folder, manifest, training)),
        held_out=Batch(
            torch.stack(means) if means else torch.empty(0, *manifest.shape),
            {keyword: some[held_out] for keyword, some in values.items()},
        ),
        column="latent",
        fingerprint=fingerprint_with(manifest.fingerprint, values),
        transform=transform,
        latents=rows,
        conditions={keyword: some[training] for keyword, some in values.items()},
        classes=find_classes(columns, values, config.label_dropout, seed),
        image_set=manifest.image_set,
        autoencoder={**manifest.autoencoder, "weights_sha256": manifest.weights_sha256},
    )
    layout.check_fits(len(rows))
    return data


def _read_labels(folder: Path, manifest: LatentsManifest, columns: ConditionColumns) -> torch.Tensor:
    """The labels of all rows, int64; a `LabError` that names a row whose label is not allowed."""
    labels = LatentRows(folder, manifest, range(manifest.num_images)).labels()
    for column in columns.values():
        for row in (int(labels.argmin()), int(labels.argmax())):
            column.check(int(labels[row]), f"row {row}")
    return labels
