"""Atomic files and folders, written under a temporary name, synced to the disk and renamed; locked folders."""

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import DiskFull, LabError, how_to_continue, must_be

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk remounted read-only after errors, withdrawn permissions, a broken disk.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# safetensors, torch, numpy and shutil's copies of folders report a full disk by exceptions of their own.
_NUMBER = re.compile(r"(?:\(os error |\[Errno )(\d+)[])]")
_FULL_TEXT = re.compile(r"inline_container\.cc|PytorchStreamWriter|iostream error|requested and \d+ written")


TEMPORARY = ".tmp-lrlab-"  # prefix of unfinished files
LOCK = ".lock"


def expanded(path: str | Path) -> Path:
    """The path with a leading `~` as the home folder, if there is one; a folder may also be called `~x`."""
    return Path(os.path.expanduser(path))


def read_utf8(path: str | Path, what: str) -> str:
    """The text of a file that a user wrote; a `LabError` that says `what` the file is if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise must_be(
            what, str(path), "a file in UTF-8", "save it as UTF-8", got=f"another encoding in line {line}"
        ) from None


def temporary_beside(path: Path, mark: str = "") -> Path:
    """The temporary path of this process beside the final path of a file or folder."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}{mark}-{path.name}")


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
        number = getattr(error, "errno", None) or (int(found[1]) if found else None)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, shutil.Error) and number:  # whose text lists all files
            reason = os.strerror(number)
        if number in FULL or _FULL_TEXT.search(str(error)):
            raise DiskFull(path, reason) from error
        if number in _NOT_WRITABLE:
            raise DiskFull(path, reason, is_full=False) from error
        raise


@contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """
    Locks a folder, which is created if need be, and removed if it stays empty; removes what killed processes left in it.

    Raises a `LabError` if another process has locked it; `option` is the option that names the folder. The system releases
    the lock of a process that ends.
    """
    made = _missing(folder)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
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
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink()
        lock.release()
        _remove_empty(made)


def is_locked(folder: Path) -> bool:
    """Whether a process has locked the folder."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # nothing can write to this folder
        return False


def _missing(folder: Path) -> list[Path]:
    """The folder and its parents, as far as they do not exist."""
    return [*itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents))]


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):  # unless they hold a result
        for folder in folders:
            folder.rmdir()


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """The temporary path of a file or folder, which is removed at the end if it is still there."""
    made, temporary = _missing(path.parent), temporary_beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
    finally:
        with suppress(OSError):  # it must not hide why something could not be written
            if temporary.exists():
                _delete(temporary)
        _remove_empty(made)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path` when the block ends and disappears if it fails."""
    # The ending of the name stays, since libraries choose the format by it.
    with full_disk_explained(path), _unfinished(path) as temporary:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def atomic_folder(path: Path, own: Sequence[str] = ("**/*",)) -> Iterator[Path]:
    """
    Yields an empty folder to write into, which becomes `path` when the block ends and disappears if it fails.

    It replaces an older folder, so it is only for folders inside a result of this program; [`new_folder`] is for all others.
    Files that match none of the patterns `own` are kept.
    """
    with full_disk_explained(path), _unfinished(path) as temporary:
        if path.is_symlink() or path.is_file():
            raise LabError(
                f"{str(path)!r} is not a folder, but a folder must be made there. Hint: move it away; it is not replaced."
            )
        temporary.mkdir()
        yield temporary
        if path.exists():
            for name in _files_in(path, ("**/*",)) - _files_in(path, own) - _files_in(temporary, ("**/*",)):
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path / name, temporary / name, follow_symlinks=False)
        sync_tree(temporary)
        old = temporary_beside(path, "-old")
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        sync(path.parent)
        if old.exists():
            _delete(old)


@contextmanager
def new_folder(path: Path, option: str = "folder") -> Iterator[Path]:
    """
    Yields an empty folder to write into, which becomes `path` when the block ends and disappears if it fails. Nothing is
    replaced: raises a `LabError` if there is anything, or if another process is writing there; `option` names the path.
    """
    check_new_folder(path, option)
    room = path.with_name(f"{TEMPORARY}{path.name}")  # the same in all processes, so that what a killed one left is removed
    made = _missing(path.parent)
    try:
        with full_disk_explained(path), locked(room, option), _unfinished(room / path.name) as temporary:
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            check_new_folder(path, option)  # again, since the block may take hours
            os.rename(temporary, path)
            sync(path.parent)
    finally:
        _remove_empty([room, *made])


def _files_in(folder: Path, patterns: Sequence[str]) -> set[str]:
    """Relative paths of the files and links in a folder that match a pattern."""
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix() for path in found if path.is_symlink() or not path.is_dir()}


def remove(path: Path) -> None:
    """Removes a file, a link or a folder; a folder disappears at once, so that a killed process leaves no part of it."""
    if path.is_dir() and not path.is_symlink():
        path = path.replace(temporary_beside(path, "-old"))
    if path.is_symlink() or path.exists():
        _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_leftovers(*folders: Path, pattern: str = f"{TEMPORARY}*") -> None:
    """Removes temporary files of killed processes from these folders; call it only while holding their lock."""
    for folder in folders:
        for path in folder.glob(pattern):
            _delete(path)


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
    with full_disk_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def is_plain_name(name: Any) -> bool:
    """Whether a value is the name of a file, without a path."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name


def number_in(name: str, prefix: str) -> int | None:
    """The number after a prefix of a file name, such as 20 in `checkpoint-20`; `None` for any other name."""
    found = re.fullmatch(rf"{re.escape(prefix)}([0-9]{{1,15}})", name)
    return int(found[1]) if found else None


def folder_beside(folder: Path, ending: str) -> Path:
    """The folder next to this one with its name and an ending, for `.` and `..`, too."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(f"{named.name}{ending}")


def check_new_folder(folder: Path, option: str = "folder") -> None:
    """Raises a `LabError` unless a folder is new or empty. The current folder and links cannot be replaced."""
    problem = ""
    if folder.is_symlink():
        problem = "is a link, and links are not replaced"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "exists and is not an empty folder"
    elif folder.resolve() == Path.cwd():
        problem = "is the current folder, which cannot be replaced"
    if problem:
        raise LabError(f"{option} {str(folder)!r} {problem}. Hint: give a new one.")
