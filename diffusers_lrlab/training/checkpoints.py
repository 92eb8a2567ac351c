"""Checkpoints: everything that an exact resume needs, copied to the host between two updates and written by a thread. A run
that diverges writes none.

    checkpoint-500/unet/               raw weights, for from_pretrained of the model's class (denoiser/ for points)
    checkpoint-500/unet_ema/           their moving average; those of further widths in unet_ema_2/, ...
    checkpoint-500/state.pt            state of each part: optimizer, sampler, log, ..., and of the random generators
    checkpoint-500/trainer.json        clock, configuration, and facts about model and data
    checkpoint-500/timesteps.parquet   rows of losses by noise level so far
    checkpoint-500/manifest.json       sizes and SHA-256 of all files, written last

Noise, timesteps and data order need no state: they are functions of seed and update (see `core/streams.py`), except in
samplers that follow the losses. The same holds for the schedules that follow the clock.
"""

import copy
import importlib
import json
import math
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from ..core.errors import Diverged, LabError, how_to_continue
from ..core.files import atomic_file, atomic_folder, remove, write_text
from ..core.manifest import write_manifest
from ..core.streams import random_states, restore_random_states, stream_seed
from ..core.words import counted
from ..data.streams import ShardedStream
from ..diagnostics.timestep_log import write_timesteps
from .config import ResolvedConfig
from .resume import check_same_run, read_state
from .run_folder import RunFolder, checkpoint_update, is_checkpoint
from .run_state import RunState

_STATE = "state.pt"


class CheckpointWriter:
    """
    Writes checkpoints, one at a time, in a thread of the main process; all processes call the same methods.

    Errors of the thread are raised by the next call. A `with` block waits at its end for the checkpoint being written.
    """

    def __init__(self, accelerator: Accelerator, config: ResolvedConfig, folder: RunFolder):
        self.accelerator, self.config, self.folder = accelerator, config, folder
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with suppress(*(() if kind is None else (Exception,))):  # must not hide the error that ended the run
            self._wait()

    def begin(self, run: RunState, parts: dict[str, Any], rows: Any = None) -> Path:
        """
        Starts writing `checkpoint-<update>` between two updates, once the previous one is finished. It appears atomically,
        and then the oldest are removed. The state of further `parts` and `rows` of losses by noise level are saved, too.
        """
        self._wait()
        path = self.folder.path / f"checkpoint-{run.update}"
        states = gather_object([random_states()])
        parts = parts | {"run": run.state_dict(), "random_states": states}
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            parts |= {"optimizer": run.optimizer.state_dict(), **({} if scaler is None else {"scaler": scaler.state_dict()})}
            models = {run.component: _with_weights(run.model, {})}
            names = [name for name, _ in run.model.named_parameters()]
            for average, name in zip(run.averages, average_folders(run), strict=True):
                models[name] = _with_weights(run.model, dict(zip(names, average.shadow_params, strict=True)))
            facts = {"update": run.update, "config": run.config.to_dict(), **facts_of(self.accelerator, run)}
            facts |= {"num_updates": run.plan.num_updates, "num_processes": self.accelerator.num_processes}
            facts |= {"log_rows": self.folder.count_rows()}
            # `save_pretrained` imports this, and with it peft: in a thread, beside an import of a pipeline, in a circle.
            importlib.import_module("diffusers.hooks")
            executor = ThreadPoolExecutor(1, "write checkpoint")
            self._pending = executor.submit(self._write, path, models, on_host(parts), facts, rows)
            executor.shutdown(wait=False)
        return path

    def finish(self) -> None:
        """Waits, with all processes, until the last checkpoint is written."""
        self._wait()
        self.accelerator.wait_for_everyone()

    def check(self) -> None:
        """Raises an error of the thread, if there was one."""
        if self._pending is not None and self._pending.done():
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, path: Path, models: dict[str, Any], parts: dict[str, Any], facts: dict[str, Any], rows: Any) -> None:
        folder = self.folder
        if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
            raise LabError(f"{str(path)!r} is not a checkpoint of a run. Hint: move it away, then {how_to_continue()}.")
        with atomic_folder(path) as temporary:
            for name, model in models.items():
                model.save_pretrained(temporary / name)
            torch.save(parts, temporary / _STATE)
            if rows is not None:
                write_timesteps(rows, folder.timesteps_file)
                shutil.copyfile(folder.timesteps_file, temporary / folder.timesteps_file.name)
            write_text(temporary / "trainer.json", json.dumps(facts, indent=2))
            write_manifest(temporary)
            folder.check_there()  # other files recreate folders
        remove_old_checkpoints(folder, self.config)


class DivergenceGuard:
    """Decides when a run has diverged."""

    def __init__(self, run: RunState, checkpoints: CheckpointWriter):
        self.run, self.checkpoints = run, checkpoints
        self.num_skipped = self._skipped_in_a_row = 0  # updates with gradients that are not finite

    def error(self, what: str = "The loss is not finite") -> Diverged:
        """The error for a run that diverges now, with the remedy."""
        self.checkpoints.finish()  # the message names the last one
        run, last = self.run, self.checkpoints.folder.checkpoints()
        lr = run.current_lr * (1.0 if run.lr_factor is None else run.lr_factor)
        kept = f" The last checkpoint with finite weights is {last[-1]}." if last else ""
        return Diverged(
            f"{what} around update {run.update} at learning rate {lr:.3g}: training has diverged. Lower --learning_rate, "
            f"lengthen --lr_warmup_steps or lower --max_grad_norm.{kept}"
        )

    def count_skipped(self, was_skipped: bool) -> None:
        """Counts an update that was skipped or not; raises `Diverged` after more in a row than are allowed."""
        self.num_skipped += was_skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
        if self._skipped_in_a_row > (most := self.run.config.skip_bad_updates or 0):
            raise self.error(f"The gradients of {counted(most + 1, 'update')} in a row are not finite")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_updates": {"total": self.num_skipped, "in_a_row": self._skipped_in_a_row}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        skipped = state["skipped_updates"]
        self.num_skipped, self._skipped_in_a_row = skipped["total"], skipped["in_a_row"]


def find_nonfinite(run: RunState, **more: Any) -> str | None:
    """The first part of a run, or of `more`, that is not finite; all processes call this."""
    parts = {**more, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    if run.average is not None:
        parts["moving average"] = run.average.shadow_params
    device = run.objective.device
    norms = []
    for part in parts.values():
        tensors = [leaf.detach() for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        # Tensors on the device first, where norms are combined; not the 2-norm, which overflows before the values do.
        tensors = sorted(filter(torch.is_floating_point, tensors), key=lambda tensor: tensor.device.type != device.type)
        norms.append(torch.nn.utils.get_total_norm(tensors, math.inf).to(device, torch.float64))
    of_processes = run.objective.gather(torch.stack(norms)[None]).isfinite().all(dim=0).tolist()  # the only read
    return next((name for name, is_finite in zip(parts, of_processes, strict=True) if not is_finite), None)


def facts_of(accelerator: Accelerator, run: RunState) -> dict[str, Any]:
    """Facts that must be equal in a checkpoint and the run that resumes from it, besides the configuration."""
    plan, data = run.plan, run.data
    stream = {"stream": data.train.facts} if isinstance(data.train, ShardedStream) else {}
    start = {} if plan.start is None else {"started_from": plan.start.facts}
    # First, as it explains why the data differ.
    encoded = {} if data.autoencoder is None else {"autoencoder": data.autoencoder}
    return {
        **encoded,
        "global_batch": plan.layout.global_batch,
        "mixed_precision": accelerator.mixed_precision,
        "compile": accelerator.state.dynamo_plugin.backend.value.lower(),  # "no" without compilation
        "model": plan.model_config,
        **start,
        "data": {"name": data.name, "fingerprint": data.fingerprint, "num_images": data.num_images, **stream},
    }


def on_host(state: Any) -> Any:
    """A deep copy of nested containers; GPU tensors are copied to pinned memory with one synchronization."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    copies: dict[int, Any] = {}
    for tensor in tensors:
        copied = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        copies[id(tensor)] = copied.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copy.deepcopy(state, copies)


def _with_weights(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A copy of a model for `save_pretrained`, with a copy of its weights in which some are replaced."""
    held, weights = copy.copy(model), on_host(model.state_dict() | weights)
    held.state_dict = lambda: weights
    return held


def average_folders(run: RunState) -> list[str]:
    """The folders of the averages of a run in a checkpoint."""
    return [f"{run.component}_ema" + (f"_{number}" if number > 1 else "") for number in range(1, len(run.averages) + 1)]


def load_checkpoint(accelerator: Accelerator, run: RunState, path: Path, folder: RunFolder) -> dict[str, Any]:
    """
    Restores a run and its folder from a checkpoint, and returns the state of the further parts. Raises a `LabError` if the
    checkpoint belongs to another run.
    """
    facts = read_state(path)
    if not (path / _STATE).exists():
        raise LabError(f"{str(path)!r} was written by another version of diffusers_lrlab. Hint: resume with that version.")
    check_same_run(facts, facts_of(accelerator, run), path)
    parts = torch.load(path / _STATE, weights_only=True, map_location="cpu")
    for average, name in zip(run.averages, average_folders(run), strict=True):
        weights = _saved_weights(run, path / name)
        average.load_state_dict({"shadow_params": [weights[name] for name, _ in run.model.named_parameters()]})
    run.model.load_state_dict(_saved_weights(run, path / run.component))
    run.optimizer.load_state_dict(parts["optimizer"])
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(parts["scaler"])
    # Random states last: building a model, as diffusers does for the weights, draws from them.
    if facts["num_processes"] != accelerator.num_processes:
        # Each process had its own random numbers, from which dropout alone draws.
        set_seed(stream_seed(run.config.seed, "dropout", accelerator.process_index, facts["update"]) % 2**32)
    else:
        restore_random_states(parts["random_states"][accelerator.process_index])
    folder.reopen()
    rows = path / folder.timesteps_file.name
    if folder.is_writer and rows.exists():
        with atomic_file(folder.timesteps_file) as temporary:
            shutil.copyfile(rows, temporary)
    run.load_state_dict(parts["run"])
    folder.rewind(RunFolder(path.parent), run.update, facts["log_rows"])
    return parts


def _saved_weights(run: RunState, folder: Path) -> dict[str, torch.Tensor]:
    return type(run.model).from_pretrained(folder).state_dict()


def is_kept_for_good(update: int, config: ResolvedConfig) -> bool:
    """Whether --keep_every keeps a checkpoint of this update, to branch or extend from."""
    return config.keep_every is not None and update % config.keep_every == 0


def remove_old_checkpoints(folder: RunFolder, config: ResolvedConfig) -> None:
    """
    Removes checkpoints but the newest `checkpoints_total_limit` and those of `keep_every`; at a resume also those that a
    killed run left.
    """
    limit = config.checkpoints_total_limit
    for old in folder.checkpoints()[:-limit] if limit else ():
        if not is_kept_for_good(checkpoint_update(old), config):
            remove(old)
