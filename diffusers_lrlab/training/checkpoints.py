"""Checkpoints: everything an exact continuation needs, in diffusers' and accelerate's own formats.

    checkpoint-500/unet/             raw weights, for from_pretrained of the model's class (denoiser/ for points)
    checkpoint-500/unet_ema/         their moving average and its state
    checkpoint-500/optimizer.bin     by accelerate
    checkpoint-500/random_states_RANK.json   of the global generators of each process
    checkpoint-500/trainer.json      clock, schedule, configuration, data fingerprint
    checkpoint-500/timesteps.safetensors   sums of losses by noise level, and what follows the losses
    checkpoint-500/timesteps.parquet the rows of losses by noise level until then
    checkpoint-500/manifest.json     sizes and SHA-256 of all these, written last

Noise, timesteps and data order need no state: they follow from seed and update (see `streams.py`), but for samplers that
follow the losses.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from ..averaging.averages import without_config_warnings
from ..core.errors import LabError
from ..core.files import SHARED, atomic_file, atomic_folder, full_disk_explained, remove, temporary_beside, write_text
from ..core.manifest import write_manifest
from ..core.random_states import random_states, restore_random_states
from .base_run import BaseRun
from .divergence import find_nonfinite, kept_checkpoints
from .resume import check_same_run, read_state
from .run_folder import RunFolder

_TENSORS = "timesteps.safetensors"
_OWNERS = ("objective", "observer")  # of what is in there


def register_model_format(accelerator: Accelerator, component: str) -> list[Any]:
    """
    Makes `accelerator.save_state` write the model as a diffusers folder `component` instead of a bare state dict, until
    `remove()` of what is returned.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        # Every process runs this; they hold the same weights.
        weights.clear()
        if accelerator.is_main_process:
            accelerator.unwrap_model(models[0]).save_pretrained(Path(folder) / component)

    def load(models: list[Any], folder: str) -> None:
        model = accelerator.unwrap_model(models.pop())
        with without_config_warnings():
            saved = type(model).from_pretrained(folder, subfolder=component)
        model.load_state_dict(saved.state_dict())

    return [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]


def _facts(accelerator: Accelerator, run: BaseRun) -> dict[str, Any]:
    """What a start must have in common with the checkpoint that it goes on from, besides its configuration."""
    plan, data = run.plan, run.data
    return {
        "global_batch": plan.layout.global_batch,
        "num_processes": plan.layout.num_processes,
        "num_updates": plan.num_updates,
        "mixed_precision": accelerator.mixed_precision,
        "model": plan.model_config,
        "data": {"name": data.name, "fingerprint": data.fingerprint, "num_images": data.num_images},
    }


def save_checkpoint(accelerator: Accelerator, run: BaseRun, folder: RunFolder) -> Path:
    """Writes `checkpoint-<update>` atomically, between two updates, and removes the oldest ones. All processes call this."""
    state = run.state_dict()
    parts = {owner: state.pop(owner, {}) for owner in _OWNERS}
    path = folder.path / f"checkpoint-{run.update}"
    if accelerator.is_main_process:
        with atomic_folder(path, shared=True) as temporary:
            accelerator.wait_for_everyone()
            _save_share(accelerator, temporary)
            if run.average is not None:
                run.average.save(temporary / f"{run.kind.component}_ema")
            tensors = {f"{owner}.{key}": value for owner, part in parts.items() for key, value in part.items()}
            save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, temporary / _TENSORS)
            facts = {"config": run.config.to_dict(), **_facts(accelerator, run)}
            write_text(temporary / "trainer.json", json.dumps({**facts, **state, "log": folder.log_sums()}, indent=2))
            if folder.timesteps_file.exists():
                shutil.copyfile(folder.timesteps_file, temporary / folder.timesteps_file.name)
            accelerator.wait_for_everyone()
            write_manifest(temporary)
        kept = kept_checkpoints(folder, run.config)
        for old in folder.checkpoints():
            if old not in kept:
                remove(old)
    else:
        accelerator.wait_for_everyone()
        with full_disk_explained(path):
            _save_share(accelerator, temporary_beside(path, SHARED))
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    return path


def _save_share(accelerator: Accelerator, folder: Path) -> None:
    """What accelerate saves of this process, with the random states as numbers instead of a pickle."""
    accelerator.save_state(str(folder))
    write_text(_states_file(accelerator, folder), json.dumps(random_states()))
    os.remove(_states_file(accelerator, folder).with_suffix(".pkl"))


def _states_file(accelerator: Accelerator, folder: Path) -> Path:
    return folder / f"random_states_{accelerator.process_index}.json"


def load_checkpoint(accelerator: Accelerator, run: BaseRun, path: Path, folder: RunFolder) -> None:
    """Puts a run back to where a checkpoint was written; raises a `LabError` if that is of another run."""
    state: dict[str, Any] = read_state(path)
    check_same_run(state, _facts(accelerator, run), path)
    if run.average is not None:
        run.average.load(path / f"{run.kind.component}_ema")
    # Random states last: building a model, as diffusers does for the weights, draws from them. Those of earlier versions are
    # a pickle, which accelerate restores (by torch's loader of plain data, as the optimizer).
    accelerator.load_state(str(path))
    if (states := _states_file(accelerator, path)).exists():
        restore_random_states(json.loads(states.read_text(encoding="utf-8")))
    # It also restores a count of micro-batches; a checkpoint lies between updates, whatever the accumulation was.
    accelerator.step = 0
    state.update({owner: {} for owner in _OWNERS})
    for name, tensor in load_file(path / _TENSORS).items():
        owner, _, key = name.partition(".")
        state[owner][key] = tensor
    rows = path / folder.timesteps_file.name
    if folder.is_writer and rows.exists():
        with atomic_file(folder.timesteps_file) as temporary:
            shutil.copyfile(rows, temporary)
    run.load_state_dict(state)
    if part := find_nonfinite(run):  # as earlier versions saved it
        raise LabError(
            f"In {path.name} the {part} is not finite: the run had diverged. Resume from an earlier one, by its name, "
            "or start again by --overwrite_output_dir."
        )
    folder.rewind(run.update, state.get("log"))
