"""What worker processes do first of all; nothing is imported here that prints."""

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
    Prints into a file from now on, ends when the process that started this one has ended, however, and leaves a terminal's
    Ctrl-C to that.
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
    tqdm.set_lock(RLock())  # its own is the system's, which a killed process would leave behind


def end_with_parent(worker: int = 0) -> None:
    """
    Ends this process as soon as the one that started it has ended, even if it was killed; can be the `worker_init_fn` of a
    `DataLoader`. Without it, one that waits for work, for its source, or to hand over what it has would wait for ever.
    """
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # What the parent forks later has a copy of what `join` waits for, and may live on. A fork server is nobody's parent.
    is_child = os.getppid() == parent.pid
    while parent.is_alive() and not (is_child and os.getppid() != parent.pid):
        parent.join(_POLL_SECONDS)
    os._exit(1)
