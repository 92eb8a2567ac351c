"""Batches that are ready before they are asked for."""

from collections.abc import Generator, Iterator
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import torch

from .batch import Batch

_AHEAD = 2  # batches
_LOOK = 0.1  # seconds between looks at whether anybody still wants them
_LEAVE = 5.0  # seconds after which a source that hangs is left alone, as the end of a run need not wait for it


def prefetched(batches: Generator[Batch, None, None]) -> Iterator[Batch]:
    """The same batches, read by a thread while others are trained on; in pinned memory where there is a GPU to copy to."""
    try:
        first = next(batches)  # by this thread, whose fork the workers are
    except StopIteration:
        return
    ready: Queue[Any] = Queue(_AHEAD)
    stopped = Event()
    thread = Thread(target=_read, args=(batches, ready, stopped), daemon=True, name="read batches")
    thread.start()
    try:
        yield first
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        stopped.set()
        thread.join(_LEAVE)


def _read(batches: Generator[Batch, None, None], ready: Queue[Any], stopped: Event) -> None:
    """Puts batches into the queue, and `None` or an exception at the end."""
    last: BaseException | None = None
    pins = torch.cuda.is_available()
    try:
        for batch in batches:
            _put(ready, batch.pin_memory() if pins else batch, stopped)
            if stopped.is_set():
                break
    except BaseException as error:  # raised where the batches are used
        last = error
    finally:
        batches.close()
    _put(ready, last, stopped)


def _put(ready: Queue[Any], item: Any, stopped: Event) -> None:
    while not stopped.is_set():
        try:
            ready.put(item, timeout=_LOOK)
            return
        except Full:
            continue
