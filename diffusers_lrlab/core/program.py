"""The run of a program and of its workers: standard streams, errors and exit status, Ctrl-C and SIGTERM."""

import atexit
import faulthandler
import gc
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from typing_extensions import Self

from .errors import Interrupted, LabError, cut, is_first_process, printable

_BROKEN_PIPE = 128 + 13  # SIGPIPE, which Windows lacks


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


# Imports make half a million objects that stay, over which the garbage collector would pass again and again.
_USUAL = gc.get_threshold()
_AT_START = (100_000, *_USUAL[1:])


def freeze_imports() -> None:
    """
    Ends the start of a command, in which [`exit_status`] makes garbage collection rare: restores the usual thresholds, and
    excludes all existing objects from later collections. Called before a model is made: garbage among these objects is never
    freed.
    """
    if gc.get_threshold() == _AT_START:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def exit_status(program: Callable[[], int | None], all_ranks: bool = True) -> int:
    """
    Runs a program. Returns 0, 2 after an error that the user can fix, or 128 + the number of a signal; like a signal counts
    that the reader of its output has closed the pipe (`lrlab list | head`).

    Unless torch is imported already, as in a notebook, garbage is collected rarely during the imports, and not at exit.
    """
    if "torch" not in sys.modules and gc.get_threshold() == _USUAL:
        gc.set_threshold(*_AT_START)
        atexit.register(gc.freeze)
    try:
        return _status_of(program, all_ranks)
    finally:
        if gc.get_threshold() == _AT_START:
            gc.set_threshold(*_USUAL)


def _status_of(program: Callable[[], int | None], all_ranks: bool) -> int:
    open_standard_streams()
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


# --- signals as exceptions and as notes, and worker processes --------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 1.0
_ECHO_SECONDS = 3


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


class InterruptGuard:
    """
    Notes SIGINT and SIGTERM during a `with` block; a second one ends the process immediately. An unhandled signal is passed
    to the previous handler.

    The processes agree over a process group on the CPU, without device synchronization.
    """

    def __init__(self) -> None:
        self._received, self._received_at = 0, 0.0
        self._group: Any = None
        import torch.distributed as dist  # heavy

        from .environment import OTHERS_WAIT

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=OTHERS_WAIT)

    def __enter__(self) -> Self:
        # Only the main thread can handle signals; a run in another thread is stopped by its program.
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
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

    def received(self) -> int:
        """The signal that any process has received, 0 without one; all processes must call it at the same update."""
        if self._group is None:
            return self._received
        import torch
        import torch.distributed as dist

        number = torch.tensor(self._received)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)


def begin_worker() -> None:
    """Ends this process when its parent ends, and leaves a terminal's Ctrl-C to the parent."""
    gc.set_threshold(*_AT_START)
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
