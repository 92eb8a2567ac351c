"""Batches: data with their conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .images import normalise

Conditions = Mapping[str, torch.Tensor]
"""Conditions by the keyword of the model's `forward`: `{"class_labels": (n,)}`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """
    Data and conditions, row by row. Slicing, moving and joining apply to both.

    Args:
        data (`torch.Tensor`): Images or points `(n, ...)`, normalised or as 8-bit levels.
        conditions (`Mapping[str, torch.Tensor]`): Keyword arguments of the model, `(n, ...)` each; empty for a model that
            takes none.
    """

    data: torch.Tensor
    conditions: Conditions = field(default_factory=dict)

    @classmethod
    def stack(cls, examples: Sequence[tuple[torch.Tensor, Conditions]]) -> Batch:
        """A batch of one or more examples, whose tensors have no batch dimension."""
        keywords = examples[0][1]
        conditions = {keyword: torch.stack([own[keyword] for _, own in examples]) for keyword in keywords}
        return cls(torch.stack([data for data, _ in examples]), conditions)

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """One batch from one or more batches with the same conditions."""
        conditions = {keyword: torch.cat([part.conditions[keyword] for part in parts]) for keyword in parts[0].conditions}
        return cls(torch.cat([part.data for part in parts]), conditions)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice | list[int] | torch.Tensor) -> Batch:
        """The examples of a slice, of row numbers, or of a mask."""
        if isinstance(rows, int):
            # Also if a batch is iterated, which would never end.
            raise TypeError(f"A batch is indexed by a slice or several row numbers, got {rows!r}.")
        return self.map(lambda values: values[rows])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """A batch with `change` applied to the data and each condition."""
        return Batch(change(self.data), {keyword: change(values) for keyword, values in self.conditions.items()})

    def with_data(self, data: torch.Tensor) -> Batch:
        """A batch with the same conditions and other data."""
        return Batch(data, self.conditions)

    def normalised(self) -> Batch:
        """8-bit levels as float32 in [-1, 1]."""
        return self.with_data(normalise(self.data))

    def to(self, device: torch.device | str, **options: Any) -> Batch:
        """A copy on `device`; `options` are those of `torch.Tensor.to`."""
        return self.map(lambda values: values.to(device, **options))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a GPU copies asynchronously."""
        return self.map(torch.Tensor.pin_memory)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on `device`, copied asynchronously and normalised there."""
    if device.type == "cuda":
        batch = batch.pin_memory()  # only copies from pinned memory are asynchronous
    return batch.to(device, non_blocking=True).normalised()
