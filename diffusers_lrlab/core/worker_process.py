"""Start and end of worker processes. Nothing that prints is imported here."""

import faulthandler
import multiprocessing
import os
from multiprocessing.connection import Connection
from threading import RLock, Thread

from tqdm import tqdm

_POLL_SECONDS = 1.0

connection: Connection  # to the process that started this one


def begin(to_parent: Connection, log: str) -> None:
    """
    Redirects output to a file, ends this process when its parent ends, and leaves a terminal's Ctrl-C to the parent.
    """
    global connection
    connection = to_parent
    end_with_parent()
    if hasattr(os, "setsid"):  # not on every system
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable()
    tqdm.set_lock(RLock())  # tqdm's own is a system semaphore, which a killed process would leave behind


def end_with_parent(worker: int = 0) -> None:
    """
    Ends this process as soon as its parent has ended, even if the parent was killed; can be the `worker_init_fn` of a
    `DataLoader`. Otherwise a worker that waits for its queue or its source would never end.
    """
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Later forks of the parent inherit the sentinel and may outlive it, so compare parent ids. Under a fork server getppid()
    # is the server's.
    is_child = os.getppid() == parent.pid
    while parent.is_alive() and not (is_child and os.getppid() != parent.pid):
        parent.join(_POLL_SECONDS)
    os._exit(1)
