"""Ctrl-C and SIGTERM as exceptions; Ctrl-C while a program starts."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PROGRAMS = ("lrlab", "train_ddpm.py", "find_lr.py", "run_study.py")


def end_quietly_by_ctrl_c() -> None:
    """
    Makes Ctrl-C end one of the lab's programs without a traceback while it imports, until [`interrupts_as_usual`].

    Third-party programs keep Python's behaviour.
    """
    started = sys.orig_argv[1:]
    module = started[started.index("-m") + 1] if sys.argv[:1] == ["-m"] and "-m" in started[:-1] else ""
    is_ours = module.partition(".")[0] == "diffusers_lrlab" or Path((sys.argv or [""])[0]).name in _PROGRAMS
    in_main_thread = threading.current_thread() is threading.main_thread()
    if is_ours and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interrupts_as_usual() -> None:
    """Makes Ctrl-C a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _frame: FrameType | None) -> None:
    # Not an exception, which modules that are being imported may catch.
    os.write(2, b"Stopped before anything was done.\n")
    os._exit(128 + number)


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
