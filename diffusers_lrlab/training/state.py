"""From a trainer to a checkpoint and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoints import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from .trainer import Trainer


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What a start must have in common with the checkpoint that it goes on from."""
    plan, data = trainer.plan, trainer.data
    return {
        "global_batch": plan.layout.global_batch,
        "num_processes": plan.layout.num_processes,
        "num_updates": plan.num_updates,
        "mixed_precision": trainer.accelerator.mixed_precision,
        "model": plan.model_config,
        "data": {"name": data.name, "fingerprint": data.fingerprint, "num_images": data.num_images},
    }


def save_trainer(trainer: Trainer) -> Path:
    """Writes a checkpoint of the update that the trainer is at. All processes call this."""
    state = {
        "config": trainer.config.to_dict(),
        **_facts(trainer),
        "schedules": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "sums": trainer.accelerator.gather(trainer.sums[None]).tolist(),
        "training_seconds": trainer.training_seconds,
        "audit": trainer.audit.state_dict(),
    }
    tensors = {f"objective.{key}": value for key, value in trainer.objective.state_dict().items()}
    if trainer.observer is not None:
        trainer.observer.write()
        tensors |= {f"observer.{key}": value for key, value in trainer.observer.state_dict().items()}
    keep = trainer.config.checkpoints_total_limit or 0
    # diffusers builds a model to save an EMA, which draws random numbers that dropout would miss.
    with torch.random.fork_rng(devices=[]):
        return save_checkpoint(
            trainer.accelerator, trainer.kind, trainer.folder, trainer.update, trainer.ema, state, tensors, keep
        )


def resume_trainer(trainer: Trainer, checkpoint: Path) -> None:
    """Goes back to where a checkpoint was written."""
    state = load_checkpoint(trainer.accelerator, trainer.kind, checkpoint, trainer.ema, _facts(trainer))
    for scheduler, saved in zip(trainer.schedulers, state["schedules"], strict=True):
        scheduler.load_state_dict(saved)
    trainer.update = state["update"]
    trainer.training_seconds = state["training_seconds"]
    trainer.audit.load_state_dict(state["audit"])
    process, device = trainer.accelerator.process_index, trainer.accelerator.device
    trainer.sums = torch.tensor(state["sums"][process], device=device)
    trainer.objective.load_state_dict(_part(state["tensors"], "objective"))
    if trainer.observer is not None:
        trainer.observer.load_state_dict(_part(state["tensors"], "observer"), trainer.update)
    trainer.folder.rewind(trainer.update)


def _part(tensors: dict[str, torch.Tensor], owner: str) -> dict[str, torch.Tensor]:
    start = f"{owner}."
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
