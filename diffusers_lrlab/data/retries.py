"""Reading from a source that may fail or hang: tried again, with a message, and then an error."""

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from ..core.errors import LabError, warn
from ..core.hub_client import without_tokens

Item = TypeVar("Item")

_TRIES, _FIRST_WAIT, _PATIENCE = 5, 1.0, 120.0  # seconds: before the second try, doubled after each; between two items


def read_with_retries(items: Callable[[], Iterator[Item]], failure: str, remedy: str) -> list[Item]:
    """
    All items, which are asked for anew if that fails or hangs. A `LabError` is not tried again.

    `failure` says what could not be read, and `remedy` what to do after the last try.
    """
    wait = _FIRST_WAIT
    for last in [False] * (_TRIES - 1) + [True]:
        try:
            return _with_stall_timeout(_PATIENCE, items())
        except LabError:
            raise
        except Exception as error:  # sources raise errors of fsspec, pyarrow, httpx and of the system
            reason = without_tokens(f"{type(error).__name__}: {error}").partition("\n")[0]
            if last:
                raise LabError(f"{failure} ({reason}), {_TRIES} times. {remedy}") from error
            warn(f"{failure} ({reason}); the next try is in {wait:g} seconds.")
            time.sleep(wait)
            wait *= 2
    raise AssertionError  # the last try returns or raises


def _with_stall_timeout(seconds: float, items: Iterator[Item]) -> list[Item]:
    """All items, or a `TimeoutError` if none comes for so long; a thread that hangs is left alone."""
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
