"""Ctrl-C and SIGTERM end a run at the next update boundary, with a checkpoint, on all processes alike."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Interrupted(Exception):
    """
    A run that was asked to stop and has saved itself.

    Args:
        signal_number (`int`): 2 for Ctrl-C, 15 for SIGTERM; a script leaves with 128 + this.
        checkpoint (`Path`): Where to go on from.
    """

    def __init__(self, signal_number: int, checkpoint: Path):
        super().__init__(
            f"Stopped by {signal.Signals(signal_number).name} after a whole update. To go on, give the same command "
            f"again with --resume_from_checkpoint latest ({checkpoint})."
        )
        self.signal_number, self.checkpoint = signal_number, checkpoint


class InterruptGuard:
    """
    Notes SIGINT and SIGTERM while a `with` block runs; a second one ends the process at once.

    The processes agree on a CPU channel of their own, so that asking costs no device synchronisation.
    """

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._received = 0
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> InterruptGuard:
        self._previous = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        for each in self._signals:
            signal.signal(each, signal.SIG_DFL)

    def received(self) -> int:
        """The signal that any of the processes got, 0 without one. All processes must ask at the same update."""
        if self._group is None:
            return self._received
        answer = torch.tensor(self._received)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        return int(answer)
