"""Comparison of a result with its manifest, before it is uploaded, repeated or reported."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .errors import LabError, shortened, warn
from .manifest import CARD, MANIFEST, DamagedManifest, Sums, find_damage_of_file, read_manifest

_RECORD = {"run": Path("lrlab", "run.json"), "study": Path("summary.json")}  # the files that say whether there is a manifest
_NOT_FINISHED = ("running", "failed", "cancelled")
_NONE = f"it has no {MANIFEST}: its files can be read but not verified"


@dataclass
class Held:
    """The result of comparing a folder with its manifest."""

    sums: dict[str, Sums] = field(default_factory=dict)  # of intact files
    damaged: dict[str, str] = field(default_factory=dict)  # from damaged files to what is wrong with them
    is_open: bool = False  # still being written, or the writer was killed
    notes: list[str] = field(default_factory=list)  # for the user to know, not to mend


def held_against_manifest(folder: Path, kind: str, only: Callable[[str], bool] = lambda name: True) -> Held:
    """
    Verifies the folder of a "run", "study" or "dataset", or a "download" of one, against its manifest; `only` selects the
    files to verify.

    An edited card is a note, and so is a finished result without a manifest. While the record says that a run is not
    finished, its manifest is out of date.
    """
    held, is_there = Held(), (folder / MANIFEST).exists()
    is_finished, has_manifest = _state(folder, kind)
    if not is_there and not has_manifest:
        held.notes += [_NONE] if is_finished else []
        return held
    try:
        expected = read_manifest(folder)
    except DamagedManifest as error:
        held.damaged |= {MANIFEST: str(error)} if is_finished is not False else {}
        return held
    if expected is None:
        held.is_open = True
        held.notes.append("it is not finished; the command that wrote it continues it")
        return held
    record = _RECORD.get(kind, Path(MANIFEST)).as_posix()
    if is_finished is not False or (record in expected and not find_damage_of_file(folder / record, expected[record])):
        for name, sums in expected.items():
            if only(name):
                _hold(folder, name, sums, held)
    return held


def _state(folder: Path, kind: str) -> tuple[bool | None, bool]:
    """Whether the result is finished (`None`: unknown), and whether its record says that there is a manifest."""
    if kind not in _RECORD:
        return True, False
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        record = json.loads((folder / _RECORD[kind]).read_text(encoding="utf-8"))
        state = record["run"] if kind == "run" else record
        return state.get("status") not in _NOT_FINISHED, "manifest" in state
    return None, False


def _hold(folder: Path, name: str, sums: Sums, held: Held) -> None:
    damage = find_damage_of_file(folder / name, sums)
    if damage is None:
        held.sums[name] = sums
    elif name == CARD:
        what = "has changed since it was written" if (folder / name).is_file() else "is missing"
        held.notes.append(f"the card {str(folder / name)!r} {what}")
    else:
        held.damaged[name] = damage


def refuse_damaged(folder: Path, kind: str, remedy: str, only: Callable[[str], bool] = lambda name: True) -> Held:
    """Raises a `LabError` that names damaged files; other findings of [`held_against_manifest`] are warnings."""
    held = held_against_manifest(folder, kind, only)
    _refuse(held, remedy)
    for note in held.notes:
        warn(f"{str(folder)!r}: {note}.")
    return held


def refuse_damage_in_use(folder: Path, kind: str, reads: Callable[[str], bool]) -> dict[str, Sums]:
    """
    Raises a `LabError` if the record of a run or study is damaged, or a file that `reads` selects; returns their sums. Only
    these are hashed. A result without a manifest, such as an unfinished one, cannot be verified.
    """
    record = _RECORD[kind].as_posix()
    held = held_against_manifest(folder, kind, lambda name: name == record or reads(name))
    where = shlex.quote(str(folder))
    _refuse(held, f"restore it from a copy, or make or pull the {kind} again; `lrlab check {where}` lists all damage.")
    return held.sums


@contextmanager
def damage_named(folder: Path, kind: str) -> Iterator[None]:
    """Turns what readers raise for data of another form into a `LabError`, where a folder may be a download."""
    try:
        yield
    except LabError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {shortened(str(error))}"
        raise LabError(
            f"The files of the {kind} in {str(folder)!r} are damaged or do not belong together ({what}). Hint: restore them "
            "from a copy, or pull them again."
        ) from error


def _refuse(held: Held, remedy: str) -> None:
    if damage := list(held.damaged.values()):
        more = f"; and {len(damage) - 5} more" if len(damage) > 5 else ""
        raise LabError(f"{'; '.join(damage[:5])}{more}. Hint: {remedy}")
