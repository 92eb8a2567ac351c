"""Class labels: their column, the rows that carry them, the classes, labels that training drops, and labels of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.errors import LabError, must_be
from ..core.streams import stream_generator, stream_uniform
from ..core.words import counted
from .batch import Batch, Conditions
from .options import MOST_CLASSES, DataConfig
from .sources import columns_of

KEYWORD = "class_labels"  # of the model's `forward`


@dataclass(frozen=True)
class LabelColumn:
    """A column of labels, whole numbers from 0 on."""

    name: str
    num_classes: int | None = None  # labels are below it, if it is known
    class_names: tuple[str, ...] = ()  # of a `datasets.ClassLabel`

    def check(self, value: Any, row: str) -> None:
        """Raises a `LabError` that names the row if a value is not allowed."""
        highest = torch.iinfo(torch.int64).max if self.num_classes is None else self.num_classes - 1
        if isinstance(value, int) and 0 <= value <= highest:
            return
        wanted = "a label, a whole number from 0 on" if self.num_classes is None else f"a class in [0, {highest}]"
        is_beyond = isinstance(value, int) and value > highest
        hint = f"correct or remove the row{', or raise --num_classes' if is_beyond else ''}"
        raise must_be(self.name, value, wanted, hint, of=row)

    def read_all(self, dataset: Any) -> torch.Tensor:
        """The labels of all rows of a dataset with random access, int64 `(num_rows,)`."""
        values = dataset[self.name][:]
        for row, value in enumerate(values):
            self.check(value, f"row {row}")
        return torch.tensor(values, dtype=torch.int64)


class Example(NamedTuple):
    """A cell of the data with the conditions of its row, tensors without dimensions."""

    cell: Any
    conditions: Conditions


def labelled(cell: Any, row: Mapping[str, Any], label: LabelColumn | None, name: str) -> Example:
    """A cell with the label in its row, if there is a column of labels; `name` is the row's, for errors."""
    if label is None:
        return Example(cell, {})
    label.check(row[label.name], name)
    return Example(cell, {KEYWORD: torch.tensor(row[label.name], dtype=torch.int64)})


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


def find_label_column(dataset: Any, config: DataConfig) -> LabelColumn | None:
    """The column of `--label_column`, `None` without one; a `LabError` for an unsuitable column."""
    if config.label_column is None:
        return None
    features, listing = columns_of(dataset)
    name, feature = config.label_column, features.get(config.label_column)
    if not str(getattr(feature, "dtype", "")).startswith(("int", "uint", "bool")):
        got = f"{name!r} of type {getattr(feature, 'dtype', None) or feature}" if name in features else ""
        hint = f"the columns are {listing}; class_encode_column() of `datasets` turns texts into integers"
        raise must_be("--label_column", name, "a column of whole numbers or class labels", hint, got=got)
    names = tuple(map(str, getattr(feature, "names", None) or ()))
    if config.num_classes is None and config.streaming and not getattr(feature, "num_classes", None):
        hint = f"labels of {name!r} are read one by one, so the largest is unknown; give the number of classes"
        raise must_be("--num_classes", None, "given for a stream of whole numbers without names", hint)
    if names and config.num_classes is not None and config.num_classes < len(names):
        wanted = f"{len(names)} or more, as {name!r} has"
        raise must_be("--num_classes", config.num_classes, wanted, "leave it out for all classes")
    return LabelColumn(name, config.num_classes or len(names) or None, names)


@dataclass(frozen=True)
class Classes:
    """
    The classes of labelled data.

    Args:
        names (`tuple` of `str`): By label.
        counts (`tuple` of `int`): Examples by label; ones for a stream.
        dropout (`float`): Probability that training replaces a label by [`null_label`].
        seed (`int`): Of the run.
        null_of_model (`int`, *optional*): The model's own [`null_label`]; if not given, the label after the last class.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    dropout: float
    seed: int
    null_of_model: int | None = None

    @property
    def null_label(self) -> int | None:
        """The label that stands for "no label"; `None` if none is dropped, and the model does not know it."""
        if not self.dropout:
            return None
        return len(self.names) if self.null_of_model is None else self.null_of_model

    @property
    def num_embeddings(self) -> int:
        """Labels that the model knows."""
        return len(self.names) + (self.null_label is not None)

    def drop(self, batch: Batch, image_numbers: Sequence[int]) -> Batch:
        """
        A batch with some labels replaced by [`null_label`]. The choice follows from the seed and the image number in the
        run, so it is the same for any division among micro-batches and processes, and after a resume.
        """
        if self.null_label is None:
            return batch
        drawn = [stream_uniform(self.seed, "label-dropout", number) < self.dropout for number in image_numbers]
        labels = batch.conditions[KEYWORD].masked_fill(torch.tensor(drawn), self.null_label)
        return Batch(batch.data, {**batch.conditions, KEYWORD: labels})

    def to_measure(self, num: int) -> torch.Tensor:
        """Labels of samples that are compared with data: int64 `(num,)`, in the data's proportions and random order."""
        ends = torch.tensor(self.counts).cumsum(0)
        evenly = (2 * torch.arange(num) + 1) * int(ends[-1]) // (2 * num)
        labels = torch.searchsorted(ends, evenly, right=True)
        return labels[torch.randperm(num, generator=stream_generator(0, "labels-of-samples", num))]

    def to_show(self, num: int) -> torch.Tensor:
        """
        Labels of samples to look at, `num` at most: equally many of each class in order, or one of each of `num` classes
        that are evenly spread if there are more.
        """
        if each := self.num_shown_of_each(num):
            return torch.arange(len(self.names)).repeat_interleave(each)
        return torch.arange(num) * len(self.names) // num

    def num_shown_of_each(self, num: int) -> int:
        return num // len(self.names)


def find_classes(label: LabelColumn | None, labels: torch.Tensor | None, dropout: float, seed: int) -> Classes | None:
    """The classes of a column of labels, if there is one; its `labels` are not known for a stream."""
    if label is None:
        return None
    num = label.num_classes
    if num is None:
        if labels is None or not len(labels):
            raise LabError(f"The column {label.name!r} has no rows. Use data with labels.")
        num = int(labels.max()) + 1
        if num > MOST_CLASSES:
            wanted = f"a column with labels below {MOST_CLASSES:,}"
            raise must_be("--label_column", label.name, wanted, "number the classes from 0", got=f"a label {num - 1:,}")
    names = (*label.class_names, *map(str, range(len(label.class_names), num)))
    counts = [1] * num if labels is None else torch.bincount(labels, minlength=num).tolist()
    return Classes(names, tuple(counts), dropout, seed)


def describe_classes(names: Sequence[str]) -> str:
    """The names of classes, or of the first and last of many."""
    shown = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:3])}, ..., {names[-1]}"
    return f"{counted(len(names), 'class', ',')} ({shown})"
