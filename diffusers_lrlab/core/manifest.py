"""Manifests: the files of a finished result with sizes and SHA-256, by which damage is noticed.

A result has one manifest, written last. While its files change, the manifest says that it is open.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import LabError, shown
from .files import write_text
from .words import counted

MANIFEST = "manifest.json"
CARD = "README.md"  # its reader may edit it

Sums = dict[str, Any]  # "size" in bytes and "sha256" of a file


def file_sums(path: Path) -> Sums:
    """Size and hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def sums_of_bytes(content: bytes) -> Sums:
    """Size and hash of the content of a file."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(folder: Path, files: Mapping[str, Sums] | None = None) -> None:
    """Writes a manifest of these files, or of all files in the folder; call it after they are written."""
    write_text(folder / MANIFEST, manifest_text(sums_in(folder) if files is None else files))


def manifest_text(files: Mapping[str, Sums] | None) -> str:
    """The text of a manifest of these files; `None` says that the folder is being written."""
    data = files if files is None else {name: files[name] for name in sorted(files)}
    return json.dumps({"files": data, "sha256": _sum_of(data)}, indent=1) + "\n"


def open_manifest(folder: Path) -> None:
    """Marks a folder as being written, so that its files are not compared with older sums."""
    write_text(folder / MANIFEST, manifest_text(None))


def sums_in(folder: Path, paths: Iterable[Path] | None = None) -> dict[str, Sums]:
    """The sums of these files of a folder, or of all but the manifest, by relative path."""
    found = folder.rglob("*") if paths is None else paths
    files = sorted(path for path in found if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): file_sums(path) for path in files}


def with_sum(record: dict[str, Any]) -> dict[str, Any]:
    """A record with a hash of itself."""
    return {**record, "sha256": _sum_of(record)}


def checksum_matches(record: dict[str, Any]) -> bool:
    """Whether a record has the hash that [`with_sum`] gave it."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return record.get("sha256") == _sum_of(rest)


def _sum_of(data: Any) -> str:
    # Through JSON, which turns keys that are not text into text.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(data))).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Sums] | None:
    """
    The sums in the manifest of a folder, which may come from the Hub; `None` if the folder was being written. Raises a
    `LabError` if there is none, if it has changed, or if it names files outside of the folder.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        files = manifest["files"]
        is_whole = manifest["sha256"] == _sum_of(files) and (files is None or all(map(_is_entry, files.items())))
    except FileNotFoundError:
        raise LabError(f"{str(file)!r} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise LabError(f"{str(file)!r} is damaged")
    return files


def _is_entry(entry: tuple[str, Any]) -> bool:
    """Whether an entry of a manifest is a path inside the folder, with a size and a hash."""
    name, sums = entry
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts and bool(path.parts) and "\0" not in name
    return is_inside and type(sums["size"]) is int and type(sums["sha256"]) is str


def find_damage_of_file(path: Path, expected: Sums) -> str | None:
    """The difference between a file and its sums, in words; `None` if there is none."""
    if not path.is_file():
        return f"{str(path)!r} is missing"
    if (size := path.stat().st_size) != expected["size"]:
        return f"{str(path)!r} has {counted(size, 'byte')} instead of {expected['size']}"
    return None if file_sums(path) == expected else f"{str(path)!r} is damaged (its SHA-256 has changed)"


@dataclass
class Verified:
    """A folder compared with its manifest."""

    sums: dict[str, Sums] = field(default_factory=dict)  # of intact files
    damaged: list[str] = field(default_factory=list)  # what is wrong with the others
    note: str = ""  # for the user to know, not to mend
    is_open: bool = False  # still being written, or the writer was killed


def verify(folder: Path, only: Callable[[str], bool] = lambda name: True) -> Verified:
    """Compares files of a folder with its manifest, all or those that `only` selects; users may edit the card."""
    if not (folder / MANIFEST).exists():
        return Verified(note=f"it has no {MANIFEST}, which is written last: its files can be read but not verified")
    try:
        expected = read_manifest(folder)
    except LabError as error:
        return Verified(damaged=[str(error)])
    if expected is None:
        return Verified(note="it is not finished; the command that wrote it continues it", is_open=True)
    found = Verified()
    for name, sums in expected.items():
        if not only(name):
            continue
        damage = find_damage_of_file(folder / name, sums)
        if damage is None:
            found.sums[name] = sums
        elif name == CARD:
            found.note = f"the card has changed since it was written: {damage}"
        else:
            found.damaged.append(damage)
    return found


def find_damage(folder: Path) -> str | None:
    """How a folder that must have a complete manifest, such as a checkpoint, differs from it; `None` if it does not."""
    found, file = verify(folder), folder / MANIFEST
    if file.exists() and not found.is_open:
        return "; ".join(found.damaged) or None
    return f"{str(file)!r} is missing or not finished"


def refuse_damaged(folder: Path, remedy: str = "", only: Callable[[str], bool] = lambda name: True) -> Verified:
    """[`verify`]; raises a `LabError` that names damaged files."""
    found = verify(folder, only)
    if damage := found.damaged:
        more = f"; and {len(damage) - 5} more" if len(damage) > 5 else ""
        usual = f"restore them from a copy, make or pull them again; `lrlab check {shlex.quote(str(folder))}` lists all"
        raise LabError(f"{'; '.join(damage[:5])}{more}. Hint: {remedy or usual}.")
    return found


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turns what readers raise for data of another form into a `LabError`: a folder may be a download."""
    try:
        yield
    except LabError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise LabError(
            f"The files in {str(folder)!r} are damaged or do not belong together ({what}). Hint: restore them from a copy, "
            "or pull them again."
        ) from error
