"""Contents of a checkpoint: everything that an exact resume needs, in the formats of diffusers and accelerate.

    checkpoint-500/unet/             raw weights, for from_pretrained of the model's class (denoiser/ for points)
    checkpoint-500/unet_ema/         their moving average and its state; further ones in unet_ema_2/, ...
    checkpoint-500/optimizer.bin     as accelerate saves it
    checkpoint-500/random_states_RANK.json   of the global generators of each process
    checkpoint-500/trainer.json      clock, schedule, configuration, data fingerprint
    checkpoint-500/timesteps.safetensors   sums of losses by noise level, and the state of samplers that follow losses
    checkpoint-500/timesteps.parquet rows of losses by noise level so far
    checkpoint-500/manifest.json     sizes and SHA-256 of all files, written last

Noise, timesteps and data order need no state: they are functions of seed and update (see `streams.py`), except in samplers
that follow the losses.
"""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import OPTIMIZER_NAME, SCALER_NAME, gather_object, set_seed
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from ..averaging.averages import EMA, without_config_warnings
from ..core.files import atomic_file, write_text
from ..core.manifest import write_manifest
from ..core.random_states import random_states, restore_random_states
from ..core.streams import stream_seed
from ..data.streams import ShardedStream
from ..diagnostics.timestep_log import write_timesteps
from .compiling import compile_backend
from .resume import check_same_run, read_state
from .run_folder import RunFolder
from .run_state import RunState

_TENSORS = "timesteps.safetensors"
_OWNERS = ("objective", "observer")  # of these tensors


def register_model_format(accelerator: Accelerator, component: str) -> Any:
    """
    Makes `accelerator.load_state` read the model from a diffusers folder `component` instead of a bare state dict, until
    `remove()` of the returned hook.
    """

    def load(models: list[Any], folder: str) -> None:
        model = accelerator.unwrap_model(models.pop(), keep_torch_compile=False)
        with without_config_warnings():
            saved = type(model).from_pretrained(folder, subfolder=component)
        model.load_state_dict(saved.state_dict())

    return accelerator.register_load_state_pre_hook(load)


def _facts(accelerator: Accelerator, run: RunState) -> dict[str, Any]:
    """Facts that must be equal in a checkpoint and the run that resumes from it, besides the configuration."""
    plan, data = run.plan, run.data
    stream = {"stream": data.train.facts} if isinstance(data.train, ShardedStream) else {}
    start = {} if plan.start is None else {"started_from": plan.start.facts}
    # First, as it explains why the data differ.
    encoded = {} if data.autoencoder is None else {"autoencoder": data.autoencoder}
    return {
        **encoded,
        "global_batch": plan.layout.global_batch,
        "num_updates": plan.num_updates,
        "mixed_precision": accelerator.mixed_precision,
        "compile": compile_backend(accelerator),
        "model": plan.model_config,
        **start,
        "data": {"name": data.name, "fingerprint": data.fingerprint, "num_images": data.num_images, **stream},
    }


def on_host(state: Any) -> Any:
    """A deep copy of nested containers; GPU tensors are copied to pinned memory with one synchronization."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    copies: dict[int, Any] = {id(tensor): _copied(tensor.detach()) for tensor in tensors}
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copy.deepcopy(state, copies)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _with_weights(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A copy of a model for `save_pretrained`, with a copy of other weights."""
    held, weights = copy.copy(model), on_host(weights)
    held.state_dict = lambda: weights
    return held


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, copied to the host between two updates."""

    models: dict[str, Any]  # by folder
    states: dict[str, Any]  # for `torch.save`, by file
    tensors: dict[str, torch.Tensor]
    random_states: list[dict[str, Any]]  # of each process
    trainer: dict[str, Any]
    log_size: int
    rows: Any  # of losses by noise level, if they are logged

    def write(self, into: Path, folder: RunFolder) -> None:
        for name, model in self.models.items():
            model.save_pretrained(into / name)
        for name, state in self.states.items():
            torch.save(state, into / name)
        for rank, states in enumerate(self.random_states):
            write_text(_states_file(into, rank), json.dumps(states))
        save_file({key: value.contiguous() for key, value in self.tensors.items()}, into / _TENSORS)
        if self.rows is not None:
            write_timesteps(self.rows, folder.timesteps_file)
            shutil.copyfile(folder.timesteps_file, into / folder.timesteps_file.name)
        # Last, since the other files recreate folders: the folder of the run may have been removed meanwhile.
        write_text(into / "trainer.json", json.dumps({**self.trainer, "log": folder.log_sums(self.log_size)}, indent=2))
        write_manifest(into)
        folder.check_there()


def contents_of(accelerator: Accelerator, run: RunState, more: dict[str, Any], folder: RunFolder, rows: Any) -> Contents:
    """A copy of the state of a run and of `more` state; all processes call this."""
    state = run.state_dict() | more
    parts = {owner: state.pop(owner, {}) for owner in _OWNERS}
    facts = {"config": run.config.to_dict(), **_facts(accelerator, run), "num_processes": run.plan.layout.num_processes}
    models, states = {}, {}
    if accelerator.is_main_process:
        models[run.component] = _with_weights(run.model, run.model.state_dict())
        for average, name in zip(run.averages, _average_folders(run), strict=True):
            models[name] = average_as_model(run.model, average)
        states[f"{OPTIMIZER_NAME}.bin"] = on_host(run.optimizer.state_dict())
        if accelerator.scaler is not None:
            states[SCALER_NAME] = on_host(accelerator.scaler.state_dict())
    return Contents(
        models,
        states,
        on_host({f"{owner}.{key}": value for owner, part in parts.items() for key, value in part.items()}),
        gather_object([random_states()]),
        on_host({**facts, **state}),
        folder.log_size(),
        rows,
    )


def _average_folders(run: RunState) -> list[str]:
    """The folders of the averages of a run in a checkpoint."""
    return [f"{run.component}_ema" + (f"_{number}" if number > 1 else "") for number in range(1, len(run.averages) + 1)]


def average_as_model(model: Any, average: EMA) -> Any:
    """The model that `EMAModel.save_pretrained` would save, without drawing random numbers."""
    state = average.state_dict()
    own = {key: value for key, value in state.items() if key != "shadow_params"}
    names = [name for name, _ in model.named_parameters()]
    held = _with_weights(model, model.state_dict() | dict(zip(names, state["shadow_params"], strict=True)))
    held.register_to_config(**own)
    return held


def _states_file(folder: Path, rank: int) -> Path:
    return folder / f"random_states_{rank}.json"


def load_checkpoint(accelerator: Accelerator, run: RunState, path: Path, folder: RunFolder) -> dict[str, Any]:
    """
    Restores a run and its folder from a checkpoint, and returns the saved state. Raises a `LabError` if the checkpoint
    belongs to another run.
    """
    state: dict[str, Any] = read_state(path)
    check_same_run(state, _facts(accelerator, run), path)
    for average, name in zip(run.averages, _average_folders(run), strict=True):
        load_average(average, run.model, path / name)
    accelerator.load_state(str(path))
    # Random states last: building a model, as diffusers does for the weights, draws from them.
    if state["num_processes"] != accelerator.num_processes:
        # Each process had its own random numbers, from which dropout alone draws.
        set_seed(stream_seed(run.config.seed, "dropout", accelerator.process_index, state["update"]) % 2**32)
    else:
        states = _states_file(path, accelerator.process_index).read_text(encoding="utf-8")
        restore_random_states(json.loads(states))
    # accelerate also restores a count of micro-batches; a checkpoint lies between updates for any accumulation.
    accelerator.step = 0
    state.update({owner: {} for owner in _OWNERS})
    for name, tensor in load_file(path / _TENSORS).items():
        owner, _, key = name.partition(".")
        state[owner][key] = tensor
    folder.reopen()
    rows = path / folder.timesteps_file.name
    if folder.is_writer and rows.exists():
        with atomic_file(folder.timesteps_file) as temporary:
            shutil.copyfile(rows, temporary)
    run.load_state_dict(state)
    folder.rewind(run.update, state["log"])
    return state


def load_average(average: EMA, model: Any, folder: Path) -> None:
    """Restores an average from its saved model."""
    with without_config_warnings():
        saved = EMAModel.from_pretrained(str(folder), type(model))
    average.load_state_dict(saved.state_dict())
