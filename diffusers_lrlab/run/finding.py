"""What was found in a folder: what is whole, what is damaged, and how to go on."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.files import TEMPORARY
from ..core.held import held_against_manifest
from ..core.manifest import MANIFEST
from ..core.words import counted

# How names of folders that were put aside begin, and names of files end: no pattern of ours takes them for what they were.
_BEGINNING, _ENDING = "damaged-", ".damaged"


@dataclass
class Finding:
    """What was found in a folder."""

    kind: str  # "run", "study", "dataset" or "schedule"
    folder: str
    status: str  # in a few words
    whole: list[str] = field(default_factory=list)  # what is as it was written
    damaged: list[str] = field(default_factory=list)  # what is not, and how
    notes: list[str] = field(default_factory=list)  # what is to be known and need not be mended
    leftovers: list[str] = field(default_factory=list)  # what a killed process left unfinished; the next start removes it
    remedy: str = ""  # how to go on, or what to do about the damage
    repaired: list[str] = field(default_factory=list)  # what was done

    def note(self, what: str, check: Callable[[], Any]) -> None:
        """Notes whether a check of something passes."""
        if problem := problem_of(check):
            self.damaged.append(f"{what}: {problem}")
        else:
            self.whole.append(what)

    def hold(self, folder: Path) -> None:
        """Notes which files are as the manifest of the folder has them."""
        held = held_against_manifest(folder, self.kind)
        self.whole += [f"{counted(len(held.sums), 'file')} of {MANIFEST}"] if held.sums else []
        self.damaged += held.damaged.values()
        self.notes += held.notes
        if held.is_open and self.status.startswith("finished"):
            self.status = f"not finished: {self.status}, and then gone on with"

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "is_whole": not self.damaged}

    def describe(self) -> str:
        lines = [f"{self.folder}: a {self.kind}, {self.status}"]
        for title in ("repaired", "whole", "notes", "damaged", "leftovers"):
            lines += [f"{title:>10}  {what}" for what in getattr(self, title)]
        return "\n".join([*lines, *([f"{'to go on':>10}  {self.remedy}"] if self.remedy else [])])


def problem_of(check: Callable[[], Any]) -> str:
    """What a check says against something, an empty text if it passes."""
    try:
        check()
    except Exception as error:  # whatever readers raise for files that are damaged
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def refuse_damage(damage: Iterable[str]) -> None:
    """Raises a `ValueError` if there is any."""
    if found := list(damage):
        raise ValueError("; ".join(found))


def read_parquet(path: Path) -> None:
    """All of a file of rows."""
    from pyarrow import parquet

    parquet.read_table(path)


def leftovers_in(*folders: Path) -> list[str]:
    """What killed processes left unfinished there."""
    return [str(path) for folder in folders for path in sorted(folder.glob(f"{TEMPORARY}*"))]


def is_put_aside(path: Path) -> bool:
    return path.name.startswith(_BEGINNING) or path.name.endswith(_ENDING)


def quarantine(path: Path) -> str:
    """Renames what is damaged, so that nobody takes it for what it was; returns a sentence that says so."""
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    names = (f"{_BEGINNING}{path.name}{number}" if path.is_dir() else f"{path.name}{number}{_ENDING}" for number in numbers)
    new = next(each for each in map(path.with_name, names) if not each.exists())
    path.rename(new)
    return f"{path} is called {new.name} now"
