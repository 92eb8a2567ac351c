"""Which files a folder holds, with sizes and SHA-256: how damage is noticed."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import write_text
from .words import counted

MANIFEST = "manifest.json"


def file_sums(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path) -> None:
    """Notes the sums of all files in a folder, as the last of them."""
    file = folder / MANIFEST  # which may be there already, from somebody else
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != file)
    files = {path.relative_to(folder).as_posix(): file_sums(path) for path in paths}
    write_text(file, json.dumps({"files": files, "sha256": _sum_of(files)}, indent=1) + "\n")


def with_sum(record: dict[str, Any]) -> dict[str, Any]:
    """A record that is a file of its own, with a hash of itself."""
    return {**record, "sha256": _sum_of(record)}


def is_as_written(record: dict[str, Any]) -> bool:
    """Whether a record has the hash that [`with_sum`] gave it; those of earlier versions have none."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return "sha256" not in record or record["sha256"] == _sum_of(rest)


def _sum_of(data: dict[str, Any]) -> str:
    # Read again first, since JSON turns the keys of some dictionaries into text.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(data))).encode()).hexdigest()


def find_damage(folder: Path) -> str | None:
    """The first file of a folder that is not as its manifest says, and what is wrong with it; `None` if all are."""
    return next(each_damage(folder), None)


def each_damage(folder: Path) -> Iterator[str]:
    """Every such file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"]
        is_whole = manifest["sha256"] == _sum_of(expected)
    except FileNotFoundError:
        yield f"{str(folder / MANIFEST)!r} is missing"
        return
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        yield f"{str(folder / MANIFEST)!r} is damaged"
        return
    damage = (find_damage_of_file(folder / name, sums) for name, sums in expected.items())
    yield from (found for found in damage if found is not None)


def find_damage_of_file(path: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file that had these sums; `None` if nothing is."""
    if not path.is_file():
        return f"{str(path)!r} is missing"
    if (size := path.stat().st_size) != expected["size"]:
        return f"{str(path)!r} has {counted(size, 'byte')} instead of {expected['size']}"
    return None if file_sums(path) == expected else f"{str(path)!r} is damaged (its SHA-256 has changed)"
