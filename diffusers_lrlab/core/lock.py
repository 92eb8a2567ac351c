"""One process at a time in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import LabError
from .files import TEMPORARY, remove_leftovers

LOCK_FILES = (".lock",)
(_LOCK,) = LOCK_FILES


def is_locked(folder: Path) -> bool:
    """Whether a process has locked the folder."""
    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # nothing can write to this folder
        return False


def remove_leftovers_if_free(folder: Path) -> None:
    """Removes what killed processes left in a folder, unless a process is writing there."""
    if next(folder.glob(f"{TEMPORARY}*"), None) is not None:
        with suppress(LabError), locked(folder, "folder"):
            pass


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """
    Locks a folder, which is created if need be, and removed if it stays empty; removes what killed processes left in it.

    Raises a `LabError` if another process has locked it; `option` is the option that names the folder. The system releases
    the lock of a process that ends.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        mine = os.stat(folder / _LOCK)
    except Timeout:
        raise LabError(
            f"{str(folder)!r} is being written by another process. Wait for it, stop it, or give another {option}."
        ) from None
    except OSError as error:
        text = f"{option} {str(folder)!r} cannot be made or written to ({error.strerror}). Give another folder."
        raise LabError(text) from None
    try:
        remove_leftovers(folder)
        yield
    finally:
        # The folder may have been removed since, and made and locked anew by another process.
        with suppress(OSError):  # not every system removes open files
            if os.path.samestat(mine, os.stat(folder / _LOCK)):
                (folder / _LOCK).unlink()
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
