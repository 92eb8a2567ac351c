"""Merges the last checkpoints of a stretch with a constant learning rate, in place of a decay."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..averaging.merging import MERGES, merge_weights
from ..core.errors import LabError, must_be
from ..core.files import new_folder
from ..core.manifest import find_damage
from ..core.plugins import load_plugins
from ..hub.recorded_options import recorded_options
from ..hub.records import open_run, read_log
from ..schedules.expected import schedule_curves
from ..schedules.registries import SCHEDULERS
from ..training.config import ResolvedConfig
from ..training.resume import read_state
from ..training.run_folder import RunFolder, checkpoint_update
from ..training.saved_pipeline import SavedPipeline, Weights

OUT = "Give a new one with --out"
_SAME = 1e-6  # relative difference of rates that count as equal


def merge_checkpoints(folder: Path, last: int, weights: str, out: Path) -> dict[str, Any]:
    """Writes the pipeline with the merged raw weights of the `last` checkpoints, and returns what it is."""
    if weights not in MERGES:
        raise must_be("--weights", weights, f"one of {', '.join(MERGES)}", "1-sqrt weighs the oldest checkpoint most")
    with new_folder(out, OUT) as temporary:
        pipeline, checkpoints = SavedPipeline.of(folder), _last_checkpoints(folder, last)
        updates = [checkpoint_update(path) for path in checkpoints]
        check_constant(folder, checkpoints)
        shares = merge_weights(updates, weights)
        files = [_files_of(pipeline, path) for path in checkpoints]
        of_each = dict(zip(map(str, updates), shares.tolist(), strict=True))
        about = {"kind": "merge", "weights": weights, "checkpoints": of_each}
        pipeline.write(temporary, _merged(pipeline, files, shares), about)
    return about


def _last_checkpoints(folder: Path, last: int) -> list[Path]:
    found = RunFolder(folder).checkpoints()
    if last < 2 or last > len(found):
        wanted = f"from 2 to {len(found)}, the checkpoints in {str(folder)!r}" if len(found) > 1 else "of two or more"
        raise must_be("--last", last, wanted, "--checkpoints_total_limit says how many a run keeps, 0 for all")
    chosen = found[-last:]
    for path in chosen:
        if damage := find_damage(path):
            raise LabError(f"{path.name!r} cannot be merged: {damage}. Hint: restore it from a copy, or lower --last.")
    return chosen


def check_constant(folder: Path, checkpoints: list[Path]) -> None:
    """
    Raises a `LabError` if the learning rate changed between the first and the last of these checkpoints.

    A merge takes the place of a decay. After a decay it would be a second one, over checkpoints that hardly differ.
    """
    first, last = checkpoint_update(checkpoints[0]), checkpoint_update(checkpoints[-1])
    rates = _rates(folder, read_state(checkpoints[-1]))[first:last]
    known = rates[np.isfinite(rates)]
    if len(known) and np.ptp(known) <= _SAME * np.abs(known).max():
        return
    got = f"it went from {known[0]:.3g} to {known[-1]:.3g}" if len(known) else "it is not in the log"
    raise LabError(
        f"The learning rate from update {first} to {last} must be constant for a merge, and {got}. Hint: a merge takes the "
        "place of a decay, so merge checkpoints of a run without one, such as one with --lr_scheduler constant."
    )


def _rates(folder: Path, state: dict[str, Any]) -> np.ndarray:
    """
    The learning rate of each update: float64 `(num_updates,)`; NaN where it is not known.

    It is that of the schedule, or that of the log for schedules that follow losses.
    """
    config = ResolvedConfig(**recorded_options(open_run(folder, lambda name: True), str(folder), state["config"]))
    load_plugins(config.plugins)
    num_updates: int = state["num_updates"]
    if "feedback" not in SCHEDULERS[config.lr_scheduler].traits:
        batch = state["global_batch"]
        schedule, peak = config.schedule_for(batch), config.peak_learning_rate(batch)
        return schedule_curves(schedule, peak, config.start_momentum, config.lr_warmup_steps, num_updates)[0]
    rates = np.full(num_updates, np.nan)
    for row in read_log(folder):
        if "lr" in row and 1 <= row["update"] <= num_updates:
            rates[row["update"] - 1] = row["lr"]
    return rates


def _files_of(pipeline: SavedPipeline, checkpoint: Path) -> list[Path]:
    """The files with the raw weights of a checkpoint."""
    folder = checkpoint / pipeline.component
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LabError(f"{checkpoint.name!r} has no whole weights, as FSDP sharded them. Hint: train with --multi_gpu.")
    return files


def _merged(pipeline: SavedPipeline, files: list[list[Path]], shares: np.ndarray) -> Weights:
    """The weighted sum, in float32; each checkpoint is read once."""
    own = pipeline.shapes()
    total: Weights = {}
    for paths, share in zip(files, shares.tolist(), strict=True):
        for path in paths:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # it is no mapping
                    value = file.get_tensor(name)
                    if own.get(name) != tuple(value.shape):
                        hint = "the pipeline is of another run; give the run's own folder"
                        raise must_be("the checkpoint", str(path), f"of the model in {str(pipeline.folder)!r}", hint)
                    total.setdefault(name, torch.zeros(value.shape)).add_(value.float(), alpha=share)
    return total
