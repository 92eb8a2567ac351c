"""Prefetching of batches by a thread."""

from collections.abc import Generator, Iterator
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

import torch

from .batch import Batch

_AHEAD = 2  # batches
_POLL_SECONDS = 0.1  # between checks whether batches are still needed
_JOIN_SECONDS = 5.0  # the end of a run does not wait longer for a hanging source


def prefetched(batches: Generator[Batch, None, None]) -> Iterator[Batch]:
    """The same batches, read ahead by a thread; in pinned memory if there is a GPU."""
    try:
        first = next(batches)  # in this thread, so that it forks the workers
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
        thread.join(_JOIN_SECONDS)


def _read(batches: Generator[Batch, None, None], ready: Queue[Any], stopped: Event) -> None:
    """Puts batches into the queue, then `None` or an exception."""
    last: BaseException | None = None
    pins = torch.cuda.is_available()
    try:
        for batch in batches:
            _put(ready, batch.pin_memory() if pins else batch, stopped)
            if stopped.is_set():
                break
    except BaseException as error:  # raised in the consumer
        last = error
    finally:
        batches.close()
    _put(ready, last, stopped)


def _put(ready: Queue[Any], item: Any, stopped: Event) -> None:
    while not stopped.is_set():
        try:
            ready.put(item, timeout=_POLL_SECONDS)
            return
        except Full:
            continue
