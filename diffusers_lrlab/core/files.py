"""Atomic files and folders: each is written under a temporary name, synced to the disk and renamed."""

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
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
_NEW, _LOCK, _REPLACED = "new", ".lock", ".replaced"
_ALL = ("**/*",)


def expanded(path: str | Path) -> Path:
    """The path with a leading `~` as the home folder, if there is one; a folder may also be called `~x`."""
    return Path(os.path.expanduser(path))


def read_utf8(path: str | Path, what: str) -> str:
    """The text of a file that a user wrote; a `LabError` that says `what` the file is if it is not UTF-8."""
    content = Path(path).read_bytes()
    wrong = content.find(b"\0")  # of UTF-16
    if wrong < 0:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            wrong = error.start
    line = content.count(b"\n", 0, wrong) + 1
    raise must_be(what, str(path), "a file in UTF-8", "save it as UTF-8", got=f"another encoding in line {line}")


def temporary_beside(path: Path, mark: str | None = None) -> Path:
    """The temporary path of a file or folder beside its final path; one per process unless there is a mark."""
    return path.with_name(f"{TEMPORARY}{os.getpid() if mark is None else mark}-{path.name}")


def unfinished(path: Path) -> Path:
    """The path under which [`atomic_file`] and [`atomic_folder`] write, the same in all processes."""
    return temporary_beside(path, _NEW) / path.name


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
def _unfinished(path: Path, timeout: float = -1) -> Iterator[Path]:
    """
    [`unfinished`] of a path, in a folder that is locked: one process at a time writes there, and removes what a killed one
    has left. Raises `filelock.Timeout` if the lock is not free in time; by default it waits.
    """
    room = temporary_beside(path, _NEW)
    made = [*itertools.takewhile(lambda parent: not parent.exists(), room.parents)]
    lock = _locked(room, timeout)
    try:
        if (room / _REPLACED).exists() and not path.exists():
            os.replace(room / _REPLACED, path)  # killed between two renames
        _empty(room)
        yield room / path.name
    finally:
        with suppress(OSError):  # it must not hide why something could not be written
            _empty(room)
            (room / _LOCK).unlink()
        lock.release()
        with suppress(OSError):  # unless they hold a result, or another process has them now
            for folder in (room, *made):
                folder.rmdir()


def _locked(room: Path, timeout: float) -> FileLock:
    while True:
        room.mkdir(parents=True, exist_ok=True)
        lock = FileLock(room / _LOCK, timeout=timeout)
        with suppress(FileNotFoundError):  # the process that had the lock has removed the folder meanwhile
            lock.acquire()
            if (room / _LOCK).exists():
                return lock
            lock.release()


def _empty(room: Path) -> None:
    for path in room.iterdir():
        if path.name != _LOCK:
            _delete(path)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path` when the block ends and disappears if it fails."""
    # The name stays, since libraries choose the format by its suffix.
    with full_disk_explained(path), _unfinished(path) as temporary:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def atomic_folder(path: Path, own: Sequence[str] = _ALL) -> Iterator[Path]:
    """
    Yields an empty folder to write into, which becomes `path` when the block ends and disappears if it fails.

    It replaces an older folder, so it is only for folders inside a result of this program; [`new_folder`] is for all others.
    Files that match none of the patterns `own`, or that appeared during the block, are kept.
    """
    with full_disk_explained(path), _unfinished(path) as temporary:
        _check_replaceable(path)
        replaced = _files_in(path, own)
        temporary.mkdir()
        yield temporary
        sync_tree(temporary)
        _check_replaceable(path)  # again, since the block may take hours
        if path.exists():
            old = temporary.with_name(_REPLACED)
            os.replace(path, old)
            for name in _files_in(old) - replaced - _files_in(temporary):
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(old / name, temporary / name, follow_symlinks=False)
        os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def new_folder(path: Path, remedy: str = "Give a new one") -> Iterator[Path]:
    """
    Yields an empty folder to write into, which becomes `path` when the block ends and disappears if it fails. Nothing is
    replaced: raises a `LabError` if there is anything, or if another process is writing there, also if this happens later.
    """
    if path.name and temporary_beside(path, _NEW).exists():
        with suppress(Timeout), _unfinished(path, timeout=0):
            pass  # it removes what a process left that was killed after its last rename
    check_new_folder(path, remedy)
    try:
        with full_disk_explained(path), _unfinished(path, timeout=0) as temporary:
            check_new_folder(path, remedy)  # again, since another process may just have finished
            temporary.mkdir()
            yield temporary
            sync_tree(temporary)
            _rename_to_new(temporary, path, remedy)
            sync(path.parent)
    except Timeout:
        raise LabError(f"{str(path)!r} is being written by another process. {remedy}, or wait for it.") from None


def _rename_to_new(temporary: Path, path: Path, remedy: str) -> None:
    """Renames a folder to a path where there is nothing, or an empty folder."""
    try:
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        what = "was made by another program meanwhile, and nothing in it was changed"
        raise LabError(f"{str(path)!r} {what}. {remedy}, and repeat the command.") from None


def _files_in(folder: Path, patterns: Sequence[str] = _ALL) -> set[str]:
    """Relative paths of the files and links in a folder that match a pattern."""
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix() for path in found if path.is_symlink() or not path.is_dir()}


def _check_replaceable(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise LabError(
            f"{str(path)!r} is not a folder, but a folder must be made there. Hint: move it away; it is not replaced."
        )


def remove(path: Path) -> None:
    """Removes a file, a link or a folder; a folder disappears at once, so that a killed process leaves no part of it."""
    if path.is_dir() and not path.is_symlink():
        old = temporary_beside(path, "old")
        shutil.rmtree(old, ignore_errors=True)
        path = path.replace(old)
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


def check_new_folder(folder: Path, remedy: str = "Give a new one") -> None:
    """Raises a `LabError` unless a folder is new or empty. The current folder and links cannot be replaced."""
    if folder.is_symlink():
        raise LabError(f"{str(folder)!r} is a link, and links are not replaced. {remedy}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LabError(f"{str(folder)!r} exists and is not an empty folder. {remedy}.")
    if folder.resolve() == Path.cwd():
        raise LabError(f"The current folder cannot be replaced. {remedy}.")
