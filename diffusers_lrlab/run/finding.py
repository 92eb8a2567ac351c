"""The result of verifying a folder: intact and damaged files, and how to continue."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.files import TEMPORARY
from ..core.held import held_against_manifest
from ..core.manifest import MANIFEST
from ..core.words import counted

# Prefix of quarantined folders and suffix of quarantined files, which match no pattern of the package.
_BEGINNING, _ENDING = "damaged-", ".damaged"


@dataclass
class Finding:
    """The result of verifying a folder."""

    kind: str  # "run", "study", "dataset" or "schedule"
    folder: str
    status: str
    whole: list[str] = field(default_factory=list)  # intact parts
    damaged: list[str] = field(default_factory=list)  # with the damage
    notes: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)  # unfinished files of killed processes; the next start removes them
    remedy: str = ""
    repaired: list[str] = field(default_factory=list)

    def note(self, what: str, check: Callable[[], Any]) -> None:
        """Notes whether the check of a part passes."""
        if problem := problem_of(check):
            self.damaged.append(f"{what}: {problem}")
        else:
            self.whole.append(what)

    def hold(self, folder: Path) -> None:
        """Notes which files agree with the manifest of the folder."""
        held = held_against_manifest(folder, self.kind)
        self.whole += [f"{counted(len(held.sums), 'file')} of {MANIFEST}"] if held.sums else []
        self.damaged += held.damaged.values()
        self.notes += held.notes
        if held.is_open and self.status.startswith("finished"):
            self.status = f"not finished; before it was resumed, {self.status}"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "is_whole": not self.damaged}

    def describe(self) -> str:
        lines = [f"{self.folder}: a {self.kind}, {self.status}"]
        for title in ("repaired", "whole", "notes", "damaged", "leftovers"):
            lines += [f"{title:>10}  {what}" for what in getattr(self, title)]
        return "\n".join([*lines, *([f"{'to go on':>10}  {self.remedy}"] if self.remedy else [])])


def problem_of(check: Callable[[], Any]) -> str:
    """The error of a check, or an empty text."""
    try:
        check()
    except Exception as error:  # whatever readers raise for damaged files
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def refuse_damage(damage: Iterable[str]) -> None:
    """Raises a `ValueError` if there is any damage."""
    if found := list(damage):
        raise ValueError("; ".join(found))


def read_parquet(path: Path) -> None:
    """Reads all rows of a file."""
    from pyarrow import parquet

    parquet.read_table(path)


def leftovers_in(*folders: Path) -> list[str]:
    """Unfinished files of killed processes."""
    return [str(path) for folder in folders for path in sorted(folder.glob(f"{TEMPORARY}*"))]


def is_quarantined(path: Path) -> bool:
    return path.name.startswith(_BEGINNING) or path.name.endswith(_ENDING)


def quarantine(path: Path) -> str:
    """Renames a damaged file or folder, so that nothing reads it; returns a line about it."""
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    names = (f"{_BEGINNING}{path.name}{number}" if path.is_dir() else f"{path.name}{number}{_ENDING}" for number in numbers)
    new = next(each for each in map(path.with_name, names) if not each.exists())
    path.rename(new)
    return f"{path} was renamed to {new.name}"
