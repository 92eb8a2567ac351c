"""Saved states of the runs of a stack, from which an interrupted stack resumes."""

import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...core.files import atomic_folder, remove
from ...core.manifest import find_damage, write_manifest
from ..runs.context import StudyContext
from ..spec.spec import RunSpec

_STATE = "state.pt"
_NAME = re.compile(r"\w+-[0-9]+")  # excludes temporary folders
# Runs at the same update, their states by run id, and the time when they were started.
_Saved = tuple[list[RunSpec], dict[str, dict[str, Any]], str]


def save_states(states: dict[str, dict[str, Any]], name: str, update: int, started: str, study: StudyContext) -> Path:
    folder = study.folder.stacks / f"{name}-{update}"
    if not folder.exists():  # else it has these states
        with atomic_folder(folder) as temporary:
            torch.save({"members": states, "started": started}, temporary / _STATE)
            write_manifest(temporary)
    return folder


def find_saved(study: StudyContext, specs: list[RunSpec]) -> _Saved:
    """
    The saved runs that are furthest, from any stack: the grouping depends on the number of cores and on --stack_size. The
    other runs are computed after them.
    """
    specs = study.folder.missing(specs)
    furthest = -1
    found: _Saved = (specs, {}, datetime.now(timezone.utc).isoformat(timespec="seconds"))
    wanted = {spec.id: study.data(spec).fingerprint for spec in specs}
    for path in sorted(path for path in study.folder.stacks.glob("*") if _NAME.fullmatch(path.name)):
        try:
            saved, damage = _load(path)
        except FileNotFoundError:
            continue  # another worker has replaced it
        if damage is not None and path.exists():
            study.progress.log(f"{damage}: its runs start again.")
            remove(path)
        if damage is not None:
            continue
        members = saved["members"].items()
        states = {run_id: state for run_id, state in members if wanted.get(run_id) == state["data_fingerprint"]}
        update = max((state["update"] for state in states.values()), default=-1)
        if update > furthest:  # the runs of a file are at the same update, or done
            together = [spec for spec in specs if spec.id in states]
            furthest, found = update, (together, states, saved["started"])
    return found


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    """The saved state of a stack, and a description of any damage."""
    if damage := find_damage(path):
        return {}, damage
    return torch.load(path / _STATE, weights_only=True, map_location="cpu", mmap=True), None
