"""Atomic files and folders: each is written under a temporary name, synced to the disk and renamed."""

import errno
import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import DiskFull, LabError, how_to_continue

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk remounted read-only after errors, withdrawn permissions, a broken disk.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# safetensors, torch and numpy report a full disk by exceptions of their own.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_FULL_TEXT = re.compile(r"inline_container\.cc|PytorchStreamWriter|iostream error|requested and \d+ written")


TEMPORARY = ".tmp-lrlab-"  # prefix of unfinished files
SHARED, OLD = "shared", "old"  # marks in the names of what several processes write, and of what is about to be deleted


def temporary_beside(path: Path, mark: str | None = None) -> Path:
    """The temporary path of a file or folder beside its final path; one per process unless there is a mark."""
    return path.with_name(f"{TEMPORARY}{os.getpid() if mark is None else mark}-{path.name}")


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """
    Turns errors of a full or read-only disk into `DiskFull`, and those of a file in the way of a folder, or of a folder in
    the way of a file, into a `LabError`.
    """
    try:
        yield
    except LabError:
        raise
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        where = path if path.is_dir() else next((parent for parent in path.parents if parent.is_file()), path)
        raise LabError(
            f"{str(path)!r} cannot be written: {str(where)!r} is in its way ({error.strerror}). Hint: move that away, then "
            f"{how_to_continue()}."
        ) from error
    except Exception as error:
        found = _NUMBER.search(str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if number in FULL or _FULL_TEXT.search(str(error)):
            raise DiskFull(path, reason) from error
        if number in _NOT_WRITABLE:
            raise DiskFull(path, reason, is_full=False) from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path` when the block ends and disappears if it fails."""
    # The suffix stays, since libraries choose the format by it.
    temporary = temporary_beside(path)
    try:
        with full_disk_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        with suppress(OSError):  # it must not hide why the file could not be written
            temporary.unlink()


@contextmanager
def atomic_folder(path: Path, shared: bool = False) -> Iterator[Path]:
    """
    Yields an empty folder to write into, which replaces `path` when the block ends and disappears if it fails.

    A shared folder has the same name in all processes that write into it; only one of them may enter this block.
    """
    temporary = temporary_beside(path, SHARED if shared else None)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with full_disk_explained(path):
            _check_replaceable(path)
            temporary.mkdir(parents=True)
            yield temporary
            sync_tree(temporary)
            _check_replaceable(path)  # again, since the block may take hours
            old = put_aside(path) if path.exists() else None
            os.replace(temporary, path)
            sync(path.parent)
            if old is not None:
                shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    check_kinds([], [path])
    if path.is_symlink():
        raise LabError(f"{str(path)!r} is a link, and links are not replaced. Hint: remove it, or give its target.")


def put_aside(folder: Path) -> Path:
    """Renames a folder that is about to be deleted, so that a killed process leaves no partial folder under its name."""
    old = temporary_beside(folder, OLD)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(folder, old)
    return old


def remove(path: Path) -> None:
    """Removes a file, a link or a folder; a folder disappears at once."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(put_aside(path))
    else:
        path.unlink()


def remove_leftovers_of_the_dead(path: Path) -> None:
    """Removes temporary files beside `path` that belong to processes of this machine which no longer run."""
    for leftover in path.parent.glob(f"{TEMPORARY}*-{glob.escape(path.name)}"):
        process = leftover.name.removeprefix(TEMPORARY).removesuffix(f"-{path.name}")
        if process.isdigit() and not _is_running(int(process)):
            remove_leftovers(path.parent, pattern=glob.escape(leftover.name))


def _is_running(process: int) -> bool:
    with suppress(PermissionError):  # another user's
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True


def remove_leftovers(*folders: Path, pattern: str = f"{TEMPORARY}*") -> None:
    """Removes temporary files of killed processes from these folders; call it only while holding their lock."""
    for folder in folders:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk, so that they survive a power cut."""
    is_folder = path.is_dir()
    # Not every system can sync folders.
    with suppress(OSError) if is_folder else full_disk_explained(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """[`sync`] of a folder and of everything in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, line: str) -> None:
    """Appends a whole line or nothing."""
    size = path.stat().st_size if path.exists() else 0
    with full_disk_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            with suppress(OSError):  # if the file cannot be changed at all, nothing was written
                os.truncate(path, size)
            raise


def check_kinds(files: Iterable[Path], folders: Iterable[Path], option: str = "") -> None:
    """Raises a `LabError` if a folder is in the way of a file, or anything else in the way of a folder."""
    other = f", or give another {option}" if option else ""
    remedy = f"Hint: move it away{other}; nothing of yours is replaced."
    for path in files:
        if path.is_dir():
            raise LabError(f"{str(path)!r} is a folder where a file must be written. {remedy}")
    for path in folders:
        if (path.exists() and not path.is_dir()) or (path.is_symlink() and not path.exists()):
            raise LabError(f"{str(path)!r} is not a folder, but a folder must be made there. {remedy}")


def folder_beside(folder: Path, ending: str) -> Path:
    """The folder next to this one with its name and an ending, for `.` and `..`, too."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(f"{named.name}{ending}")


def check_new_folder(folder: Path, remedy: str = "Give a new one") -> None:
    """Raises a `LabError` unless a folder is new or empty. The current folder cannot be replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LabError(f"{str(folder)!r} exists and is not an empty folder. {remedy}.")
    if folder.resolve() == Path.cwd():
        raise LabError(f"The current folder cannot be replaced. {remedy}.")
