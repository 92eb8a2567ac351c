"""Ctrl-C and SIGTERM end a run at the next update boundary, with a checkpoint, on all processes alike."""

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
    Notes SIGINT and SIGTERM while a `with` block runs; an impatient second one ends the process at once. A
    signal that was not acted on is passed to the previous handler.

    The processes agree on a CPU channel of their own, so that asking costs no device synchronisation; and nobody waits for
    the answer, which comes one update later.
    """

    _answer: tuple[torch.Tensor, Any] | None = None  # on its way: the largest number, and what to wait for

    def __init__(self) -> None:
        self._received, self._received_at = 0, 0.0
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=OTHERS_WAIT)

    def __enter__(self) -> InterruptGuard:
        # Python lets only the main thread handle signals; a run in another one is stopped by its own program.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or issubclass(kind, Interrupted):  # else the others may never have asked
            self._last_answer()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if kind is None and self._received:  # it came after the last look
            signal.raise_signal(self._received)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A launcher passes on what the terminal has already sent to everyone, so an echo is not impatience.
        if self._received and time.monotonic() - self._received_at > _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self._received:
            self._received, self._received_at = number, time.monotonic()

    def received(self, now: bool = False) -> int:
        """
        The signal that any of the processes got until the last time they asked, or until `now`, which waits for all of them;
        0 without one. All processes must ask at the same update.
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
