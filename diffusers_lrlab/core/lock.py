"""One process at a time in a folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import LabError
from .files import TEMPORARY, remove_leftovers, write_text

_LOCK, _HOLDER = LOCK_FILES = (".lock", ".lock-holder")


def holder_of(folder: Path) -> str | None:
    """The process that has locked the folder, as text; `None` if it is not locked."""
    if not (folder / _LOCK).exists():
        return None
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return None
    except Timeout:
        return _named_holder(folder)
    except OSError:  # nothing can write to this folder
        return None


def _named_holder(folder: Path) -> str:
    with suppress(OSError):
        return (folder / _HOLDER).read_text(encoding="utf-8")
    return "another process"


def remove_leftovers_if_free(folder: Path) -> None:
    """Removes what killed processes left in a folder, unless a process is writing there."""
    if next(folder.glob(f"{TEMPORARY}*"), None) is not None:
        with suppress(LabError), locked(folder, "folder"):
            pass


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """
    Locks a folder, which is created if need be, and removed if it stays empty; removes what killed processes left in it.

    Raises a `LabError` that names the process that has locked it; `option` is the option that names the folder. The system
    releases the lock of a process that ends, however it ends.
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
    me = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    try:
        remove_leftovers(folder)
        write_text(holder, me)
        yield
    finally:
        # The folder may have been removed since, and made and locked anew by another process.
        with suppress(OSError):  # not every system removes open files
            if holder.exists() and holder.read_text(encoding="utf-8") == me:
                holder.unlink()
                (folder / _LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
