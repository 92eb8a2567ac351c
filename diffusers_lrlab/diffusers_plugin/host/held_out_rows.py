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
    Holds out a `fraction` of the rows, `most` at most. A `sized_statement` of the script makes rows for a whole batch, so
    that whole batches are held out.
    """

    def __init__(
        self,
        script: HostScript,
        run: HostRun,
        fraction: float,
        most: int | None = None,
        sized_statement: ast.stmt | None = None,
    ):
        self.script, self.run, self.fraction, self.most, self.sized_statement = script, run, fraction, most, sized_statement
        # Of this process's share of the held-out rows: like the script's, but in order and without data workers.
        self.loader: torch.utils.data.DataLoader[Any] | None = None
        self.num_rows = self.num_held_out = 0  # of the script's data

    def split(self, make: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """The rows to train on, the same for every seed, for a call of `DataLoader.__init__` (`make`)."""
        from accelerate.state import PartialState

        given = inspect.signature(make).bind(None, dataset, *args, **kwargs).arguments
        self._check(dataset, given)
        self.num_rows = len(dataset)
        num = max(1, round(self.fraction * self.num_rows))
        held_out, trained = split_rows(self.num_rows, min(num, self.most or num))
        if not held_out:
            raise LabError(
                f"--validation_fraction {self.fraction} cannot hold out a row of {self.num_rows}. Use at least 5 rows, or "
                "remove --validation_fraction."
            )
        size = given.get("batch_size") or 1
        state = PartialState()
        if self.sized_statement is not None:
            held_out, trained = self._in_batches(self.sized_statement, len(held_out), size * state.num_processes)
        if given.get("drop_last") and len(trained) < size <= self.num_rows:
            raise LabError(
                f"--validation_fraction {self.fraction} leaves {len(trained)} of {counted(self.num_rows, 'row')} for "
                f"training: less than a batch of {size}, and the script drops incomplete batches. Use smaller batches, or "
                "remove --validation_fraction."
            )
        self.num_held_out = len(held_out)
        mine = held_out[state.process_index :: state.num_processes]
        kept = {name: given[name] for name in ("batch_size", "collate_fn", "pin_memory") if name in given}
        self.loader = object.__new__(torch.utils.data.DataLoader)
        make(self.loader, torch.utils.data.Subset(dataset, mine), **kept)
        return torch.utils.data.Subset(dataset, trained)

    def _in_batches(self, statement: ast.stmt, num: int, batch_size: int) -> tuple[list[int], list[int]]:
        """Whole batches of all processes together: as many as are nearest to `num` rows, within a fifth of the rows."""
        most = self.num_rows // 5
        num = max(1, round(num / batch_size)) * batch_size
        num = num if num <= most else most // batch_size * batch_size
        if not num:
            text = ast.unparse(statement).splitlines()[0]
            raise LabError(
                f"--validation_fraction {self.fraction}: the script prepares rows in whole batches (line "
                f"{statement.lineno}: {text}), so only whole batches can be held out. At most a fifth of the "
                f"{counted(self.num_rows, 'row')} may be, which is less than a batch of {batch_size}. Use smaller "
                "batches, or remove --validation_fraction."
            )
        return split_rows(self.num_rows, num)

    def _check(self, dataset: Any, given: dict[str, Any]) -> None:
        """Raises [`NotRecognised`] where rows cannot be held out, or would still be trained on."""
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise NotRecognised("its data are a stream, whose rows cannot be held out")
        if given.get("sampler") is not None or given.get("batch_sampler") is not None:
            raise NotRecognised("its loader has a custom sampler, which covers all rows")
        if (repeats := self.run.arguments.get("repeats") or 1) > 1:
            raise NotRecognised(f"each image is in several rows (--repeats {repeats}) and would still be trained on")
        known = variables_of_data(dataset)
        for name in self.script.index_moduli:
            if known.get(name, len(dataset)) != len(dataset):
                rows = f"several of its {counted(len(dataset), 'row')} ({name} is {known[name]})"
                raise NotRecognised(f"an image is in {rows} and would still be trained on")
