"""Rows that a script's loader does not get, and a loader of their own."""

import ast
import inspect
from typing import Any

import torch

from ...core.errors import LabError
from ...core.streams import split_rows
from ...core.words import counted
from ..script.source import HostScript, NotRecognised
from .generators import variables_of_data
from .run import HostRun


class HeldOutRows:
    """
    Args:
        fraction (`float`): Of the rows, to hold back.
        most (`int`, *optional*): Rows to hold back, however many there are.
        whole (`ast.stmt`, *optional*): The script's statement for whose sake whole batches are held back: it makes something
            for as many rows as a batch has.

    Attributes:
        loader: Of this process's share of the rows held back: like the script's, but in order and without data workers.
        num_rows: Of the script's data.
        num_held_out: Those that it does not train on.
    """

    def __init__(
        self,
        script: HostScript,
        run: HostRun,
        fraction: float,
        most: int | None = None,
        whole: ast.stmt | None = None,
    ):
        self.script, self.run, self.fraction, self.most, self.whole = script, run, fraction, most, whole
        self.loader: torch.utils.data.DataLoader[Any] | None = None
        self.num_rows = self.num_held_out = 0

    def hold_back(self, make: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The rows to train on, the same for every seed, for a call of `DataLoader.__init__` (`make`)."""
        from accelerate.state import PartialState

        given = inspect.signature(make).bind(None, dataset, *args, **kwargs).arguments
        self._check(dataset, given)
        self.num_rows = len(dataset)
        num = max(1, round(self.fraction * self.num_rows))
        held_out, trained = split_rows(self.num_rows, min(num, self.most or num))
        if not held_out:
            raise LabError(
                f"--validation_fraction {self.fraction} cannot hold back a row of {self.num_rows}. Use 5 rows or more, or "
                "leave it out."
            )
        size = given.get("batch_size") or 1
        state = PartialState()
        if self.whole is not None:
            held_out, trained = self._in_batches(held_out, trained, size * state.num_processes)
        if given.get("drop_last") and len(trained) < size <= self.num_rows:
            raise LabError(
                f"--validation_fraction {self.fraction} leaves {len(trained)} of {counted(self.num_rows, 'row')} to train "
                f"on: not one whole batch of {size}, and the script drops others. Use smaller batches, or leave it out."
            )
        self.num_held_out = len(held_out)
        mine = held_out[state.process_index :: state.num_processes]
        kept = {name: given[name] for name in ("batch_size", "collate_fn", "pin_memory") if name in given}
        self.loader = object.__new__(torch.utils.data.DataLoader)
        make(self.loader, torch.utils.data.Subset(dataset, mine), **kept)
        return torch.utils.data.Subset(dataset, trained)

    def _in_batches(self, held_out: list[int], trained: list[int], rows: int) -> tuple[list[int], list[int]]:
        """Whole batches of all processes, together of so many rows: the nearest number that the split can have."""
        assert self.whole is not None
        num = max(1, round(len(held_out) / rows)) * rows
        most = self.num_rows // 5
        num = num if num <= most else most // rows * rows
        if not num:
            raise LabError(
                f"--validation_fraction {self.fraction}: the script makes something for whole batches (line "
                f"{self.whole.lineno}: {_shown(self.whole)}), so that whole batches are held back, and a fifth of "
                f"{counted(self.num_rows, 'row')} is less than one of {rows}. Use smaller batches, or leave it out."
            )
        return split_rows(self.num_rows, num)

    def _check(self, dataset: Any, given: dict[str, Any]) -> None:
        """Raises [`NotRecognised`] where rows cannot be held back, or would still be trained on."""
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise NotRecognised("its data are a stream, of which no rows can be held back")
        if given.get("sampler") is not None or given.get("batch_sampler") is not None:
            raise NotRecognised("its loader has a sampler of the script's own, which is made for all rows")
        if (repeats := self.run.arguments.get("repeats") or 1) > 1:
            raise NotRecognised(f"each image is in several rows (--repeats {repeats}), and would still be trained on")
        known = variables_of_data(dataset)
        for name in self.script.row_counts:
            if known.get(name, len(dataset)) != len(dataset):
                repeated = f"an image is in several of its {counted(len(dataset), 'row')} ({name} is {known[name]})"
                raise NotRecognised(f"{repeated}, and would still be trained on")


def _shown(statement: ast.stmt) -> str:
    """The first line of a statement."""
    return ast.unparse(statement).splitlines()[0]
