"""Hands the checkpoint of a run over to another run, which continues from it with its own curve."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.files import atomic_folder, write_text
from ..core.manifest import MANIFEST, write_manifest
from .config import ResolvedConfig
from .resume import read_state
from .run_folder import RunFolder


def schedules_with_plan(
    schedules: list[dict[str, Any]], config: ResolvedConfig, global_batch: int, warmup_updates: int, num_updates: int
) -> list[dict[str, Any]]:
    """Saved schedules as those of a run of this configuration and length, at the same update."""
    length = {"num_warmup_steps": warmup_updates, "num_training_steps": num_updates}
    plan = dataclasses.asdict(config.schedule_for(global_batch)) | length
    return [{**schedule, "plan": plan} for schedule in schedules]


def hand_over(
    checkpoint: Path,
    giver: RunFolder,
    taker: RunFolder,
    config: ResolvedConfig,
    warmup_updates: int,
    num_updates: int,
    more: dict[str, Any] | None = None,
    change: Callable[[Path], None] | None = None,
) -> None:
    """
    Copies the log and, last, a checkpoint into the folder of another run.

    Args:
        checkpoint (`Path`): A checkpoint of the run `giver`.
        giver ([`RunFolder`]): The run whose state it is.
        taker ([`RunFolder`]): The run that continues from it.
        config ([`ResolvedConfig`]): The settings of that run.
        warmup_updates (`int`): Its warm-up.
        num_updates (`int`): Its length, including the updates before the checkpoint.
        more (`dict`, *optional*): Values to replace or add in `trainer.json`.
        change (`Callable`, *optional*): Changes the copied files of the checkpoint in the folder that it is given.

    Raises:
        LabError: if the log has changed since the checkpoint was written.
    """
    giver.check_log_until(checkpoint)
    state = read_state(checkpoint)
    if size := state["log"]["size"]:
        write_text(taker.metrics_file, giver.metrics_file.read_bytes()[:size].decode())
    schedules = schedules_with_plan(state["schedules"], config, state["global_batch"], warmup_updates, num_updates)
    state |= {"config": config.to_dict(), "num_updates": num_updates, "schedules": schedules} | (more or {})
    with atomic_folder(taker.path / checkpoint.name) as temporary:
        shutil.copytree(checkpoint, temporary, dirs_exist_ok=True)
        (temporary / MANIFEST).unlink()
        write_text(temporary / "trainer.json", json.dumps(state, indent=2))
        if change is not None:
            change(temporary)
        write_manifest(temporary)
