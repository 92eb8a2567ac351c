"""
Finds the trainer that a program belongs to, and checks that it has what the table's rows name, without running any of it.
"""

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import LabError
from ..script.source import HostScript
from ..trainer_table import LOOP, TRAINERS, Trainer, TrainerRow, rows_of


class Refused(LabError):
    """An option cannot act in a trainer; raised before the program starts."""


@dataclass(frozen=True)
class FoundTrainer:
    """A trainer of the table on this machine."""

    name: str
    folder: Path  # of its packages

    @property
    def trainer(self) -> Trainer:
        return TRAINERS[self.name]

    @functools.cached_property
    def title(self) -> str:
        """Its name and commit, such as "sd-scripts at 48d368f"."""
        return f"{self.name} at {_commit_of(self.folder) or 'an unknown commit'}"

    def file_of(self, row: TrainerRow) -> Path:
        return self.folder.joinpath(*row.module.split(".")).with_suffix(".py")

    def rows(self, option: str, value: object = None) -> list[TrainerRow]:
        """The rows of an option whose modules are there; raises [`Refused`] if one differs, or there is none."""
        rows = rows_of(self.name, option)
        flag = f"--{option}" + f" {value}" * bool(value)
        if not rows:
            raise Refused(f"{flag}: has nothing to act on in {self.name}. Hint: remove it; {self.trainer.instead[option]}.")
        present = [row for row in rows if self.file_of(row).is_file()]
        problems = [text for row in present if (text := self._problem(row))]
        if not present:
            problems = [f"no module {' or '.join(row.module for row in rows)}"]
        if problems:
            wanted = " and ".join(f"{row.module}.{row.signature}" for row in present or rows)
            raise Refused(
                f"{flag}: must be used with a version of {self.name} that has {wanted}, got {self.title} with "
                f"{'; '.join(problems)}. Hint: commit {self.trainer.commit} was tested."
            )
        return present

    def _problem(self, row: TrainerRow) -> str:
        """How a module differs from its row; empty if it does not."""
        found = _parameters(self.file_of(row), row.attribute)
        if found is None:
            return f"no {row.module}.{row.attribute}"
        return "" if found == row.parameters else f"{row.module}.{row.attribute}({', '.join(found)})"

    def explain(self, option: str) -> str:
        """The rows of an option, in words."""
        rows = self.rows(option)
        texts = [f"{row.module}.{row.attribute} ({row.programs})" for row in rows]
        return "; ".join(texts)

    def loop(self, option: str, value: object = None) -> HostScript:
        """The module whose text is read in place of the script's."""
        (row,) = self.rows(option, value)
        assert row.shape == LOOP
        return HostScript(str(self.file_of(row)))


def trainer_of(script: HostScript) -> FoundTrainer | None:
    """The trainer that a script belongs to."""
    return _find(script.path)


@functools.lru_cache(maxsize=8)
def _find(path: str) -> FoundTrainer | None:
    script, start = HostScript(path), Path(path).parent
    names = [alias.name for node in script.nodes(ast.Import) for alias in node.names]
    names += [node.module or "" for node in script.nodes(ast.ImportFrom) if not node.level]
    imported = {name.partition(".")[0] for name in names}
    folders = [start, start.parent, start / "src", *map(Path, sys.path)]
    for name, trainer in TRAINERS.items():
        if trainer.package in imported:
            for folder in folders:
                if all((folder / file).is_file() for file in trainer.files):
                    return FoundTrainer(name, folder)
    return None


def _commit_of(folder: Path) -> str:
    """The commit of a checkout, whose root is a folder or contains it; empty if there is none."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD", "--show-toplevel"]
    try:
        commit, root = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return commit[:7] if Path(root) in (folder.resolve(), folder.resolve().parent) else ""


def _parameters(path: Path, attribute: str) -> tuple[str, ...] | None:
    """The parameters of a function or `Class.method` in a file; `None` if there is none."""
    nodes = ast.parse(path.read_bytes()).body
    *classes, name = attribute.split(".")
    for each in classes:
        nodes = next((node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == each), [])
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
    if not functions:
        imported = [
            alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names if alias.name == name
        ]
        return _parameters_of_import(path, nodes, name) if imported else None
    arguments = functions[-1].args
    return tuple(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _parameters_of_import(path: Path, nodes: list[ast.stmt], name: str) -> tuple[str, ...] | None:
    """Of a function that a file imports from another one of its package."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            parts = (node.module or "").split(".")
            for folder in path.parents:
                source = folder.joinpath(*parts).with_suffix(".py")
                if source.is_file():
                    return _parameters(source, name)
    return None
