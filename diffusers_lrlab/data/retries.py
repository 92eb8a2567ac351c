"""Retries for sources that may fail or hang."""

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from ..core.errors import LabError, warn

Item = TypeVar("Item")

_TRIES = 5
_FIRST_WAIT = 1.0  # seconds before the second try, doubled after each
_PATIENCE = 120.0  # longest wait for an item, in seconds


def read_with_retries(items: Callable[[], Iterator[Item]], failure: str, remedy: str) -> list[Item]:
    """
    All items, from a new iterator after each failure or stall. A `LabError` is not retried.

    `failure` says what could not be read, `remedy` what to do after the last try.
    """
    wait = _FIRST_WAIT
    for last in [False] * (_TRIES - 1) + [True]:
        try:
            return _with_stall_timeout(_PATIENCE, items())
        except LabError:
            raise
        except Exception as error:  # sources raise errors of fsspec, pyarrow, httpx and of the system
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if last:
                raise LabError(f"{failure} ({reason}), {_TRIES} times. {remedy}") from error
            warn(f"{failure} ({reason}); the next try is in {wait:g} seconds.")
            time.sleep(wait)
            wait *= 2
    raise AssertionError  # the last try returns or raises


def _with_stall_timeout(seconds: float, items: Iterator[Item]) -> list[Item]:
    """All items, or a `TimeoutError` if none arrives for that long; a hanging thread is abandoned."""
    found: list[Item] = []
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            for item in items:
                found.append(item)
            ended.put(None)
        except BaseException as error:  # raised again below
            ended.put(error)

    Thread(target=run, daemon=True, name="read a shard").start()
    while True:
        before = len(found)
        try:
            error = ended.get(timeout=seconds)
        except Empty:
            if len(found) > before:
                continue
            raise TimeoutError(f"nothing was read for {seconds:g} seconds") from None
        if error is not None:
            raise error
        return found
