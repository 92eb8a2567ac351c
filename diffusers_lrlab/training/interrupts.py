"""Ctrl-C and SIGTERM end a run after the current update, with a checkpoint, in all processes."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..core.environment import OTHERS_WAIT
from ..core.errors import Interrupted
from ..core.signals import SIGNALS

_ECHO_SECONDS = 3


class InterruptGuard:
    """
    Notes SIGINT and SIGTERM during a `with` block; a second one ends the process immediately. An unhandled signal is passed
    to the previous handler.

    The processes agree over a process group on the CPU, without device synchronization. No process waits for the answer,
    which arrives one update later.
    """

    _answer: tuple[torch.Tensor, Any] | None = None  # pending: the largest number, and the work to wait for

    def __init__(self) -> None:
        self._received, self._received_at = 0, 0.0
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=OTHERS_WAIT)

    def __enter__(self) -> InterruptGuard:
        # Only the main thread can handle signals; a run in another thread is stopped by its program.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or issubclass(kind, Interrupted):  # otherwise the others may not have asked
            self._last_answer()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None and self._received:  # it arrived after the last check
            signal.raise_signal(self._received)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A launcher forwards signals that the terminal has sent to every process already: ignore an echo.
        if self._received and time.monotonic() - self._received_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self._received:
            self._received, self._received_at = number, time.monotonic()

    def received(self, now: bool = False) -> int:
        """
        The signal that any process received before the last call, or before this one with `now`, which waits for all
        processes; 0 without one. All processes must call it at the same update.
        """
        if self._group is None:
            return self._received
        number = torch.tensor(self._received)
        on_its_way = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        before = self._last_answer()
        self._answer = number, on_its_way
        return max(before, self._last_answer()) if now else before

    def _last_answer(self) -> int:
        if self._answer is None:
            return 0
        (number, on_its_way), self._answer = self._answer, None
        on_its_way.wait()
        return int(number)
