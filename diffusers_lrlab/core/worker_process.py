"""What is done first of all in a worker process, before anything is imported that prints."""

import faulthandler
import multiprocessing
import os
from multiprocessing.connection import Connection
from threading import RLock, Thread

from tqdm import tqdm

connection: Connection  # to the process that started this one


def begin(to_parent: Connection, log: str) -> None:
    """
    Prints into a file from now on, ends when the process that started this one has ended, however, and leaves a terminal's
    Ctrl-C to that.
    """
    global connection
    connection = to_parent
    Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "setsid"):  # not on every system
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable()
    tqdm.set_lock(RLock())  # its own is the system's, which a killed process would leave behind


def _end_with_parent() -> None:
    """Without it, a process whose parent was killed before it handed out any work would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
