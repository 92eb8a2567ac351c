"""Patches for other trainers, made from the user's checkout: a branch with one commit, or a patch file."""

from __future__ import annotations

import hashlib
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from ..core.errors import LabError
from .checkout import Checkout, check_targets
from .trainer_changes import CHANGES, Edit, TrainerChange


def trainer_patch(name: str, checkout: Path, out: Path | None = None, branch: str | None = None) -> str | Path:
    """
    Corrects a schedule of another trainer, with a test.

    Args:
        name (`str`): A key of `CHANGES`, such as `musubi-rex`.
        checkout (`Path`): The root of a git checkout of the trainer.
        out (`Path`, *optional*): A file for the change as `git format-patch` writes it; then nothing is written to the
            checkout.
        branch (`str`, *optional*): The new branch for the commit, by default such as `fix-musubi-rex`.

    Returns:
        `str` or `Path`: the name of the new branch, or `out`.
    """
    change = CHANGES[name]
    check_targets(out, branch)
    with tempfile.TemporaryDirectory() as scratch:
        git = Checkout(Path(checkout), Path(scratch), change.project)
        files = changed_files(name, change, git.read)
        git.refuse_uncommitted(files, everything=out is None)
        target = "" if out is not None else git.free_branch(branch or f"fix-{name}")
        if out is not None:
            git.keep_apart()
        message = f"{change.subject}\n\n{textwrap.fill(change.reason, 72, break_on_hyphens=False)}\n"
        commit = git.commit(files, message)
        if out is not None:
            return git.write_patch(commit, Path(out))
        git("branch", target, commit)
        return target


def changed_files(name: str, change: TrainerChange, read: Callable[[str], str | None]) -> dict[str, str]:
    """The new text of each file; raises a `LabError` if the old lines are not those that the change was made for."""
    path, test = change.test
    if read(path) is not None:
        raise LabError(f"{path} of this checkout exists, which {name} would add. Hint: is the patch applied already?")
    texts: dict[str, str] = {}
    for edit in change.edits:
        text = texts.get(edit.path) or read(edit.path)
        edited = None if text is None else _edited(text, edit)
        if edited is None:
            raise LabError(
                f"{edit.path} of this checkout is not as {name} needs it, at the line {edit.first!r}: must be as in commit "
                f"{change.commit} of {change.project.name}. Hint: check that commit out, or compare what changed since."
            )
        texts[edit.path] = edited
    return {**texts, path: test}


def _edited(text: str, edit: Edit) -> str | None:
    """The new text; `None` unless the old lines are there once, and unchanged."""
    lines = text.splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.strip() == edit.first]
    if len(starts) != 1:
        return None
    (start,) = starts
    if edit.checksum and checksum(lines[start : start + edit.num_lines]) != edit.checksum:
        return None
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    new = textwrap.indent(edit.new, indent)
    return "".join([*lines[:start], new, *lines[start + edit.num_lines :]])


def checksum(lines: list[str]) -> str:
    """Lines without their common indentation, so that a moved block is still the same."""
    return hashlib.sha256(textwrap.dedent("".join(lines)).encode()).hexdigest()[:16]
