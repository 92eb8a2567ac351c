"""One process at a time in a folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import LabError
from .files import write_text

_LOCK, _HOLDER = LOCK_FILES = (".lock", ".lock-holder")


def holder_of(folder: Path) -> str | None:
    """Who is inside such a block with the folder now; `None` if nobody is."""
    if not (folder / _LOCK).exists():
        return None
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return None
    except Timeout:
        return _named_holder(folder)
    except OSError:  # a folder that cannot be written has nobody who writes there
        return None


def _named_holder(folder: Path) -> str:
    with suppress(OSError):
        return (folder / _HOLDER).read_text(encoding="utf-8")
    return "another process"


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """
    No other process enters such a block with the folder, which is made if need be, and removed if it stays empty.

    Raises a `LabError` that names the process that is in one; `option` is how the user gave the folder. The system takes
    the lock from a process that ends, however it ends.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock, holder = FileLock(folder / _LOCK, timeout=0), folder / _HOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise LabError(
            f"{str(folder)!r} is being written by {_named_holder(folder)}. Wait for it, stop it, or give another {option}."
        ) from None
    except OSError as error:
        text = f"{option} {str(folder)!r} cannot be made or written to ({error.strerror}). Give another folder."
        raise LabError(text) from None
    me = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    try:
        write_text(holder, me)
        yield
    finally:
        # Somebody may have removed the folder meanwhile, and somebody else begun there.
        with suppress(OSError):  # not every system removes a file that is open
            if holder.exists() and holder.read_text(encoding="utf-8") == me:
                holder.unlink()
                (folder / _LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
