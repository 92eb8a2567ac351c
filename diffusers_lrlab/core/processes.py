"""Ctrl-C and SIGTERM as exceptions; start and end of worker processes. Nothing that prints is imported here."""

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 1.0


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


def begin() -> None:
    """Ends this process when its parent ends, and leaves a terminal's Ctrl-C to the parent."""
    end_with_parent()
    if hasattr(os, "setsid"):  # not on every system
        os.setsid()
    faulthandler.enable()
    tqdm.set_lock(threading.RLock())  # tqdm's own is a system semaphore, which a killed process would leave behind


def end_with_parent(worker: int = 0) -> None:
    """
    Ends this process as soon as its parent has ended, even if the parent was killed; can be the `worker_init_fn` of a
    `DataLoader`. Otherwise a worker that waits for its queue or its source would never end.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Later forks of the parent inherit the sentinel and may outlive it, so compare parent ids. Under a fork server getppid()
    # is the server's.
    is_child = os.getppid() == parent.pid
    while parent.is_alive() and not (is_child and os.getppid() != parent.pid):
        parent.join(_POLL_SECONDS)
    os._exit(1)
