"""Conditions: columns of numbers, such as class labels, that a model gets beside its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.errors import must_be
from .batch import Conditions
from .shard_rows import digest_of
from .sources import columns_of


@dataclass(frozen=True)
class ConditionColumn:
    """A column with one number per row."""

    name: str
    dtype: torch.dtype  # int64 or float32
    num_classes: int | None = None  # values are below it
    is_label: bool = False  # values are whole numbers from 0
    class_names: tuple[str, ...] = ()  # of a `datasets.ClassLabel`

    def read(self, value: Any, row: str) -> torch.Tensor:
        """A value as a tensor without dimensions; a `LabError` that names the row if it is not allowed."""
        self.check(value, row)
        return torch.tensor(value, dtype=self.dtype)

    def read_all(self, values: Sequence[Any]) -> torch.Tensor:
        """The values of all rows: `(num_rows,)`."""
        for row, value in enumerate(values):
            self.check(value, f"row {row}")
        return torch.tensor(values, dtype=self.dtype)

    def check(self, value: Any, row: str) -> None:
        """Raises a `LabError` that names the row if a value is not allowed."""
        is_whole = self.dtype is torch.int64
        info = torch.iinfo(torch.int64) if is_whole else torch.finfo(torch.float32)
        low, high = (info.min, info.max) if self.num_classes is None else (0, self.num_classes - 1)
        low = 0 if self.is_label else low
        # False for NaN.
        if isinstance(value, int if is_whole else (int, float)) and low <= value <= high:
            return
        wanted = "a whole number" if is_whole else "a finite number that float32 can hold"
        wanted = "a label, a whole number from 0 on" if self.is_label else wanted
        wanted = wanted if self.num_classes is None else f"a class in [0, {high}]"
        is_beyond = self.is_label and isinstance(value, int) and value > high
        hint = f"correct or remove the row{', or raise --num_classes' if is_beyond else ''}"
        raise must_be(self.name, value, wanted, hint, of=row)


ConditionColumns = Mapping[str, ConditionColumn]
"""Columns of conditions by the keyword of the model's `forward`."""


class Example(NamedTuple):
    """A cell of the data with the conditions of its row, tensors without dimensions."""

    cell: Any
    conditions: Conditions


def find_conditions(dataset: Any, asked: Mapping[str, str] | None) -> dict[str, ConditionColumn]:
    """The named columns, by keyword; a `LabError` for one without a number in each row."""
    if not asked:
        return {}
    features, listing = columns_of(dataset)
    found = {}
    for keyword, name in asked.items():
        kind = str(getattr(features.get(name), "dtype", ""))
        if not kind.startswith(("int", "uint", "bool", "float", "double")):
            raise must_be(keyword, name, "a column of numbers", f"the columns are {listing}", of="conditions")
        dtype = torch.float32 if kind.startswith(("float", "double")) else torch.int64
        found[keyword] = ConditionColumn(name, dtype, getattr(features[name], "num_classes", None))
    return found


def no_conditions(columns: ConditionColumns) -> dict[str, torch.Tensor]:
    """Empty conditions, without rows: `(0,)` each."""
    return {keyword: torch.empty(0, dtype=column.dtype) for keyword, column in columns.items()}


def read_conditions(dataset: Any, columns: ConditionColumns) -> dict[str, torch.Tensor]:
    """The conditions of all rows of a dataset with random access: `(num_rows,)` each."""
    return {keyword: column.read_all(dataset[column.name][:]) for keyword, column in columns.items()}


def example(cell: Any, row: Mapping[str, Any], columns: ConditionColumns, name: str) -> Example:
    """A cell with the conditions in its row; `name` is the row's, for errors."""
    return Example(cell, {keyword: column.read(row[column.name], name) for keyword, column in columns.items()})


class Examples(Sequence[Example]):
    """Cells with the conditions of their rows."""

    def __init__(self, cells: Any, conditions: Conditions):
        self.cells, self.conditions = cells, conditions

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, row: Any) -> Any:
        return self._example(self.cells[row], row)

    def __iter__(self) -> Iterator[Example]:
        return (self._example(cell, row) for row, cell in enumerate(self.cells))

    def _example(self, cell: Any, row: int) -> Example:
        return Example(cell, {keyword: values[row] for keyword, values in self.conditions.items()})


def fingerprint_with(fingerprint: str, conditions: Conditions) -> str:
    """The fingerprint of data with conditions; unchanged if there are none."""
    if not conditions:
        return fingerprint
    return digest_of([fingerprint, *((keyword, conditions[keyword].numpy().tobytes()) for keyword in sorted(conditions))])
