"""Ctrl-C and SIGTERM as exceptions."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_raised(make_error: Callable[[int], BaseException]) -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise `make_error(signal number)` at once in this block."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise make_error(number)

    # Python lets only the main thread handle signals.
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, stop) for number in SIGNALS} if in_main_thread else {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
