"""The folder of a run that starts from a checkpoint of another run, made whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.environment import launch_command
from ..core.files import new_folder, number_in, write_text
from ..core.manifest import MANIFEST, write_manifest
from ..training.resume import read_state
from ..training.run_folder import FINDER_FILES, RunFolder
from ..training.snapshots import inherit_snapshots

if TYPE_CHECKING:
    from ..schedules.expected import RunCurve
    from ..training.config import ResolvedConfig
    from .parent import Parent


def hand_over(
    parent: Parent, at: int, curve: RunCurve, config: ResolvedConfig, facts: dict[str, Any], output_dir: Path
) -> None:
    """
    Makes the folder of a run from the checkpoint of another run.

    Args:
        parent ([`Parent`]): The other run.
        at (`int`): The update of its checkpoint.
        curve ([`RunCurve`]): The curve of the new run.
        config ([`ResolvedConfig`]): The settings of the new run.
        facts (`dict`): The entry `parent` of its record.
        output_dir (`Path`): Its folder, which must be new.

    Raises:
        LabError: if the log of the other run has changed since the checkpoint was written.
    """
    source = parent.checkpoints[at]
    parent.folder.check_log_until(source)
    with new_folder(output_dir, "Give another one with --out") as made:
        folder = RunFolder(made)
        write_text(folder.lab / "run.json", json.dumps(_record(parent, at, curve, config, facts), indent=2) + "\n")
        size = read_state(source)["log"]["size"]
        if size:
            write_text(folder.metrics_file, parent.folder.metrics_file.read_bytes()[:size].decode())
        _copy_beside(parent.folder, folder, at, parent.num_updates)
        inherit_snapshots(parent.folder, folder, at, config.to_dict())
        _copy_checkpoint(source, made / source.name, curve, config)


def _record(parent: Parent, at: int, curve: RunCurve, config: ResolvedConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """A record with the settings of the new run and no results."""
    before = parent.record
    train = {key: value for key, value in before["train"].items() if key not in ("results", "loss_spikes")}
    run = {
        "status": "prepared",
        "command": launch_command() or "lrlab extend",
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "starts": [],
        "seconds": 0.0,
        "program_registrations": before["run"].get("program_registrations", []),
        "parent": facts,
    }
    train |= {"num_updates": curve.num_updates, "updates_done": at}
    return {"run": run, "train": train, "config": config.to_dict(), "meta": before["meta"]}


def _copy_beside(giver: RunFolder, taker: RunFolder, at: int, num_updates: int) -> None:
    """Copies what checkpoints leave out: the samples so far, and the finder's result."""
    last = min(at, num_updates - 1)  # those of the end were drawn because the run ended there
    samples = [
        path for path in (giver.lab / "samples").glob("*") if (number_in(path.stem, "update-") or num_updates) <= last
    ]
    for file in (*samples, *(giver.lab / name for name in FINDER_FILES)):
        if file.exists():
            target = taker.path / file.relative_to(giver.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _copy_checkpoint(source: Path, target: Path, curve: RunCurve, config: ResolvedConfig) -> None:
    """Copies a checkpoint, with the settings, the length and the schedule of the new run."""
    shutil.copytree(source, target)
    state = read_state(target)
    plan = dataclasses.asdict(config.schedule_for(state["global_batch"]))
    plan |= {"num_warmup_steps": curve.warmup_updates, "num_training_steps": curve.num_updates}
    schedules = [{**schedule, "plan": plan} for schedule in state["schedules"]]
    state |= {"config": config.to_dict(), "num_updates": curve.num_updates, "schedules": schedules}
    (target / MANIFEST).unlink()
    write_text(target / "trainer.json", json.dumps(state, indent=2))
    write_manifest(target)
