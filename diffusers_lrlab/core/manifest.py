"""Manifests: the files of a folder with sizes and SHA-256, by which damage is detected."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import LabError
from .files import write_text
from .words import counted

MANIFEST = "manifest.json"
CARD = "README.md"  # its reader may edit it

Sums = dict[str, Any]  # "size" in bytes and "sha256" of a file


class DamagedManifest(LabError):
    """A manifest is missing or damaged, so nothing can be verified."""


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
    `DamagedManifest` if there is none, if it has changed, or if it names files outside of the folder.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        files = manifest["files"]
        is_whole = manifest["sha256"] == _sum_of(files) and (files is None or all(map(_is_entry, files.items())))
    except FileNotFoundError:
        raise DamagedManifest(f"{str(file)!r} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise DamagedManifest(f"{str(file)!r} is damaged")
    return files


def _is_entry(entry: tuple[str, Any]) -> bool:
    """Whether an entry of a manifest is a path inside the folder, with a size and a hash."""
    name, sums = entry
    path = PurePosixPath(name)
    is_inside = not path.is_absolute() and ".." not in path.parts and bool(path.parts) and "\0" not in name
    return is_inside and sums.keys() == {"size", "sha256"} and type(sums["size"]) is int and type(sums["sha256"]) is str


def find_damage(folder: Path) -> str | None:
    """The first difference between a folder and its manifest, in words; `None` if there is none."""
    return next(each_damage(folder), None)


def each_damage(folder: Path) -> Iterator[str]:
    """Every difference between a folder and its manifest."""
    try:
        expected = read_manifest(folder)
    except DamagedManifest as error:
        yield str(error)
        return
    if expected is None:
        yield f"{str(folder)!r} is not finished"
        return
    yield from filter(None, (find_damage_of_file(folder / name, sums) for name, sums in expected.items()))


def find_damage_of_file(path: Path, expected: Sums) -> str | None:
    """The difference between a file and its sums, in words; `None` if there is none."""
    if not path.is_file():
        return f"{str(path)!r} is missing"
    if (size := path.stat().st_size) != expected["size"]:
        return f"{str(path)!r} has {counted(size, 'byte')} instead of {expected['size']}"
    return None if file_sums(path) == expected else f"{str(path)!r} is damaged (its SHA-256 has changed)"
