"""Checks of the model: does it learn at all?"""

import torch

from ..core.words import agreeing, counted
from ..data.batch import Batch
from ..finder.on_trainer import restored_afterwards
from .subject import Subject

_PROBED = 16  # images
_MOST_PASSES = 4  # gradients pass a layer initialised at zero one pass later: a DiT has an output and gates of zeros


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
