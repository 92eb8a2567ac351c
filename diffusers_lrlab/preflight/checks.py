"""Checks before training: of the settings of a run and of its model, and all of them with those of the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.errors import LabError
from ..core.words import agreeing, counted
from ..data.batch import Batch
from ..finder.on_trainer import restored_afterwards
from ..finder.result import read_saved_result
from ..objective.process import OBJECTIVES, make_process
from ..optimizers.entries import OPTIMIZERS
from ..training.resolve import resolved_parameters
from .data_checks import CHECKS, Subject, check

if TYPE_CHECKING:
    from ..training.trainer import Trainer

_SMALL_MODEL = 5_000_000  # parameters
_USUAL = {True: (1e-4, 1e-3), False: (1e-4, 3e-4)}  # rates for AdamW, for small and for larger models
_PROBED = 16  # images
_MOST_PASSES = 4  # gradients pass a layer initialised at zero one pass later: a DiT has an output and gates of zeros


@check
def terminal_snr(subject: Subject) -> str | None:
    """
    A process that does not end in pure noise, from which samples start (arXiv 2305.08891). Not reported for the default
    noise levels, whose cost is documented: a first run should warn only of the user's choices.
    """
    config, process = subject.config, subject.run.process
    snr = float(process.levels.snr[-1])
    if snr <= 0.01:
        return None
    usual = resolved_parameters(config, OBJECTIVES[config.objective], {})
    of_default = make_process(config.objective, is_bounded=subject.plan.kind.is_bounded, **usual).levels
    if np.array_equal(process.levels.alphas_cumprod, of_default.alphas_cumprod):
        return None
    return (
        f"The last of {counted(process.num_train_timesteps, 'timestep')} has a signal-to-noise ratio of {snr:.2g}, but "
        "samples start from pure noise, which the model never sees: they will miss outlying data. "
        f"{process.terminal_noise_hint}"
    )


@check
def model_and_scheduler(subject: Subject) -> str | None:
    """A scheduler configuration beside that of the model which contradicts this run's."""
    config, start = subject.config, subject.plan.start
    if config.given_model is None:
        return None
    folder = Path(start.folder if start is not None and start.folder is not None else config.given_model).expanduser()
    folder = folder.parent if folder.is_file() else folder
    beside = [parent / "scheduler" / "scheduler_config.json" for parent in (folder.parent, folder)]
    try:
        saved = json.loads(next(path for path in beside if path.exists()).read_text(encoding="utf-8"))
    except (OSError, ValueError, StopIteration):
        return None
    found = subject.run.process.contradictions(saved)
    return f"The scheduler beside the model {config.given_model!r} {found[0]}" if found else None


@check
def ema_memory(subject: Subject) -> str | None:
    """An EMA that still remembers the beginning of the run at its end."""
    form, num_updates = subject.plan.ema_form, subject.plan.num_updates
    if not subject.config.use_ema or num_updates < 20:
        return None
    weight = float(np.prod(form.decays(num_updates)[num_updates // 10 :]))
    if weight < 0.2:
        return None
    return (
        f"At the end, {100 * weight:.0f} % of the averaged weights will be those of the first tenth of "
        f"{counted(num_updates, 'update')}: the EMA's memory is longer than the run. Use --ema power_function, whose memory "
        "grows with the run."
    )


@check
def warmup_share(subject: Subject) -> str | None:
    warmup, num_updates = subject.plan.warmup_updates, subject.plan.num_updates
    if warmup <= num_updates / 4:
        return None
    return (
        f"Warm-up takes {warmup} of {counted(num_updates, 'update')}; about 5 % is usual. Give --lr_warmup_steps as a "
        "fraction, such as 0.05."
    )


@check
def learning_rate(subject: Subject) -> str | None:
    """A rate far from the finder's, or from usual ones for the size of the model."""
    rate, config = subject.plan.learning_rate, subject.config
    found = read_saved_result(Path(config.output_dir), subject.plan)
    if found is not None and (best := found["learning_rate"]) is not None:
        if best / 10 <= rate <= best * 10:
            return None
        return f"The learning rate {rate:.3g} is {_times(rate, best)} the {best:g} that the finder suggests."
    facts = OPTIMIZERS[config.optimizer].facts
    if "learning_rate" in facts:
        return None
    size = subject.plan.num_parameters
    low, high = (end * facts.get("learning_rate_factor", 1) for end in _USUAL[size < _SMALL_MODEL])
    if low / 10 <= rate <= high * 10:
        return None
    return (
        f"The learning rate {rate:.3g} is {_times(rate, low if rate < low else high)} the usual one for {config.optimizer} "
        f"and a model of {counted(size, 'parameter', ',')}, {low:g} to {high:g}. Test it with `lrlab find-lr`."
    )


def _times(rate: float, other: float) -> str:
    return f"{rate / other:.3g} times" if rate > other else f"1/{other / rate:.3g} of"


@check
def dead_parameters(subject: Subject) -> str | None:
    """Parameters without a gradient, or gradients that are not finite, in a few passes with small steps between."""
    trainer = subject.trainer
    model = trainer.run.model
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = sum(1 for _ in model.parameters()) - len(named)
    if not named:
        return "The model has no trainable parameter."
    batch = subject.batch[: min(_PROBED, subject.plan.layout.micro_batch)].to(trainer.accelerator.device)
    if not len(batch):
        return None
    with restored_afterwards(trainer):
        model.train()
        dead: set[str] = set()
        for step in range(_MOST_PASSES):
            model.zero_grad()
            loss = _probe_loss(subject, batch, step)
            loss.backward()
            if not torch.isfinite(loss) or not all(p.grad is None or p.grad.isfinite().all() for _, p in named):
                return "The loss or a gradient of the untrained model is not finite. Check the data and the model."
            now = {name for name, parameter in named if parameter.grad is None or not parameter.grad.any()}
            dead = now if step == 0 else dead & now
            if not dead:
                break
            with torch.no_grad():
                for _, parameter in named:
                    if parameter.grad is not None:
                        parameter -= 1e-3 * parameter.grad / (parameter.grad.norm() + 1e-12)
    if not dead:
        return f"{counted(frozen, 'parameter')} of the model {agreeing(frozen, 'is', 'are')} frozen." if frozen else None
    shown = ", ".join(sorted(dead)[:3]) + (", ..." if len(dead) > 3 else "")
    return (
        f"No gradient reaches {len(dead)} of {counted(len(named), 'parameter')}: {shown}. They will keep their initial "
        "values."
    )


def _probe_loss(subject: Subject, batch: Batch, step: int) -> torch.Tensor:
    run, num_steps, images = subject.run, subject.run.process.num_train_timesteps, batch.data
    generator = torch.Generator(device=images.device).manual_seed(step)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    timesteps = torch.linspace(0, num_steps - 1, len(images), device=images.device).long()
    # In float32, as small gradients in half precision would underflow without a loss scale.
    return run.process.losses(run.model, batch, noise, timesteps).mean()


def run_checks(trainer: Trainer) -> dict[str, str]:
    """Messages of the checks that found something, by name. Restores the trainer, to the bit."""
    subject, found = Subject(trainer), {}
    for name, function in CHECKS.items():
        try:
            message = function(subject)
        except LabError as error:
            message = f"Not checked: {error}"
        if message is not None:
            found[name] = message
    return found


def check_before_training(trainer: Trainer) -> dict[str, str]:
    """Runs the requested checks, prints and returns their warnings."""
    config, accelerator = trainer.run.config, trainer.accelerator
    found: dict[str, str] = {}
    if config.preflight and accelerator.is_main_process:
        found = run_checks(trainer)
        for name, message in found.items():
            sys.stderr.write(f"warning: {message} [{name}]\n")
    accelerator.wait_for_everyone()
    return found
