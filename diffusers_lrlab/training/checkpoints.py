"""Checkpoints: everything an exact continuation needs, in diffusers' and accelerate's own formats.

    checkpoint-500/unet/             raw weights, for from_pretrained of the model's class (denoiser/ for points)
    checkpoint-500/unet_ema/         their moving average and its state
    checkpoint-500/optimizer.bin     and random_states_RANK.pkl, by accelerate
    checkpoint-500/trainer.json      clock, schedule, configuration, data fingerprint
    checkpoint-500/timesteps.safetensors   sums of losses by noise level, and what follows the losses

Noise, timesteps and data order need no state: they follow from seed and update (see `streams.py`), but for samplers that
follow the losses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import atomic_folder, full_disk_explained, write_text
from .run_folder import RunFolder, check_same_run, read_state

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

    from .kinds.base import DataKind


_TENSORS = "timesteps.safetensors"


@contextmanager
def _quiet() -> Iterator[None]:
    """Diffusers takes what an EMA keeps in its config.json for misspelt arguments of the model, and says so."""
    from diffusers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def register_model_format(accelerator: Accelerator, kind: DataKind) -> list[Any]:
    """
    Makes `accelerator.save_state` write the model as a diffusers folder instead of a bare state dict.

    Returns:
        `list`: of handles whose `remove()` undoes it.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        # Every process runs this; they hold the same weights.
        weights.clear()
        if accelerator.is_main_process:
            accelerator.unwrap_model(models[0]).save_pretrained(Path(folder) / kind.component)

    def load(models: list[Any], folder: str) -> None:
        with _quiet():
            saved = kind.model_class().from_pretrained(folder, subfolder=kind.component)
        accelerator.unwrap_model(models.pop()).load_state_dict(saved.state_dict())

    return [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]


def save_checkpoint(
    accelerator: Accelerator,
    kind: DataKind,
    folder: RunFolder,
    update: int,
    ema: EMAModel | None,
    state: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    keep: int,
) -> Path:
    """
    Writes `checkpoint-<update>` atomically and removes the oldest ones.

    Args:
        accelerator (`Accelerator`): Holds model, optimizer and gradient scaler.
        kind ([`DataKind`]): Names the folders of weights.
        folder ([`RunFolder`]): Of the run.
        update (`int`): Updates done.
        ema (`EMAModel` or `None`): Its weights are saved too.
        state (`dict`): JSON data for `trainer.json`.
        tensors (`dict`): For `timesteps.safetensors`.
        keep (`int`): How many checkpoints stay; 0 keeps all.
    """
    from safetensors.torch import save_file

    path = folder.path / f"checkpoint-{update}"
    if accelerator.is_main_process:
        with atomic_folder(path, shared=True) as temporary:
            accelerator.wait_for_everyone()
            accelerator.save_state(str(temporary))
            if ema is not None:
                ema.save_pretrained(temporary / f"{kind.component}_ema")
            save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, temporary / _TENSORS)
            write_text(temporary / "trainer.json", json.dumps({"update": update, **state}, indent=2))
            accelerator.wait_for_everyone()
        for old in folder.checkpoints()[: -keep or None] if keep else []:
            shutil.rmtree(old)
    else:
        accelerator.wait_for_everyone()
        with full_disk_explained(path):
            accelerator.save_state(str(path.with_name(f".tmp-{path.name}")))
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    return path


def load_checkpoint(
    accelerator: Accelerator, kind: DataKind, path: Path, ema: EMAModel | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """
    Puts model, optimizer, EMA and random states back.

    Args:
        accelerator (`Accelerator`): Holds model, optimizer and gradient scaler.
        kind ([`DataKind`]): Names the folders of weights.
        path (`Path`): The checkpoint.
        ema (`EMAModel` or `None`): Gets its weights back.
        facts (`dict`): What this start must have in common with the checkpoint, besides its configuration.

    Returns:
        `dict`: `trainer.json`, and as `tensors` what `timesteps.safetensors` holds.

    Raises:
        LabError: if the checkpoint is of another run.
    """
    from diffusers.training_utils import EMAModel
    from safetensors.torch import load_file

    state = read_state(path)
    check_same_run(state, facts, path)
    if ema is not None:
        with _quiet():
            saved = EMAModel.from_pretrained(str(path / f"{kind.component}_ema"), kind.model_class(), foreach=ema.foreach)
        ema.load_state_dict(saved.state_dict())
        ema.to(accelerator.device)
    # Last, since building the model for the EMA above draws from the random states that this restores.
    accelerator.load_state(str(path))
    # It also restores a count of micro-batches; a checkpoint lies between updates, whatever the accumulation was.
    accelerator.step = 0
    return {**state, "tensors": load_file(path / _TENSORS)}
