"""The start and the end of a program and of its workers: standard streams, Ctrl-C and SIGTERM, errors and exit status."""

import faulthandler
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from .errors import Interrupted, LabError, cut, is_first_process, printable

_BROKEN_PIPE = 128 + 13  # SIGPIPE, which Windows lacks
_PROGRAMS = ("lrlab", "train_ddpm.py", "find_lr.py", "run_study.py")


def begin_program() -> None:
    """
    Called before this package imports others: makes standard streams usable, and lets Ctrl-C end one of the lab's programs
    without a traceback until [`interrupts_as_usual`]. Third-party programs keep Python's behaviour.
    """
    open_standard_streams()
    started = sys.orig_argv[1:]
    module = started[started.index("-m") + 1] if sys.argv[:1] == ["-m"] and "-m" in started[:-1] else ""
    if module.partition(".")[0] != "diffusers_lrlab" and Path((sys.argv or [""])[0]).name not in _PROGRAMS:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def open_standard_streams() -> None:
    """
    Replaces closed standard streams (`>&-`, daemons, pythonw) by the null device. Otherwise a file that is opened later
    gets the number of one of them, and with it what libraries and other processes print.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # its number is the lowest free one: this
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def interrupts_as_usual() -> None:
    """Makes Ctrl-C a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _frame: FrameType | None) -> None:
    # Not an exception, which modules that are being imported may catch.
    os.write(2, b"Stopped before anything was done.\n")
    os._exit(128 + number)


def report_error(error: BaseException, all_ranks: bool = True) -> int:
    """
    Prints the error that ended a program, and returns the exit status.

    With `all_ranks` every process prints, since the error may be of one of them only.
    """
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("Stopped.\n")
        return 128 + signal.SIGINT
    if all_ranks or is_first_process():
        text = cut(str(error)) if isinstance(error, OSError) else str(error)  # which contains file names
        sys.stderr.write(printable(f"{text}\n" if isinstance(error, Interrupted) else f"error: {text}\n"))
    return 128 + error.signal_number if isinstance(error, Interrupted) else 2


def exit_status(program: Callable[[], int | None], all_ranks: bool = True) -> int:
    """
    Runs a program. Returns 0, 2 after an error that the user can fix, or 128 + the number of a signal; like a signal counts
    that the reader of its output has closed the pipe (`lrlab list | head`).
    """
    interrupts_as_usual()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows another one
            stream.reconfigure(errors="replace")
    try:
        status = program() or 0
        sys.stdout.flush()
        return status
    except (KeyboardInterrupt, Interrupted, LabError, OSError) as error:
        is_unread = isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout)
        status = _BROKEN_PIPE if is_unread else report_error(error, all_ranks)
    try:
        sys.stdout.flush()
    except OSError:  # Python must not report it again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _has_no_reader(pipe: Any) -> bool:
    poll = select.poll()
    poll.register(pipe.fileno(), 0)
    return bool(poll.poll(0))


# --- signals as exceptions, and worker processes ---------------------------------------------------------------

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


def begin_worker() -> None:
    """Ends this process when its parent ends, and leaves a terminal's Ctrl-C to the parent."""
    end_with_parent()
    if hasattr(os, "setsid"):  # not on every system
        os.setsid()
    faulthandler.enable()
    from tqdm import tqdm

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
