"""Ctrl-C and SIGTERM end a run at the next update boundary, with a checkpoint, on all processes alike."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..core.signals import SIGNALS

_ECHO_SECONDS = 3


class InterruptGuard:
    """
    Notes SIGINT and SIGTERM while a `with` block runs; an impatient second one ends the process at once.

    The processes agree on a CPU channel of their own, so that asking costs no device synchronisation.
    """

    def __init__(self) -> None:
        self._received, self._received_at = 0, 0.0
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> InterruptGuard:
        # Python lets only the main thread handle signals; a run in another one is stopped by its own program.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A launcher passes on what the terminal has already sent to everyone, so an echo is not impatience.
        if self._received and time.monotonic() - self._received_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self._received:
            self._received, self._received_at = number, time.monotonic()

    def received(self) -> int:
        """The signal that any of the processes got, 0 without one. All processes must ask at the same update."""
        if self._group is None:
            return self._received
        answer = torch.tensor(self._received)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        return int(answer)
