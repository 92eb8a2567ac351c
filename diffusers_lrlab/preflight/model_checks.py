"""Checks of the model: does it learn at all?"""

from collections.abc import Iterator

import torch

from ..core.errors import LabError
from ..core.words import agreeing, counted
from ..data.batch import Batch
from ..finder.fixed_noise import FixedNoiseObjective
from ..finder.snapshot import restored_afterwards
from ..models.registry import architecture_of
from ..optimizers.groups import set_learning_rate
from ..training.lora import has_lora
from ..training.sharding import is_sharded
from ..training.stepping import do_one_update
from .subject import Subject

_SANITY_UPDATES, _SANITY_FALL = 150, 0.5
_PROBED = 16  # images
_MOST_PASSES = 4  # gradients pass a layer initialised at zero one pass later: a DiT has an output and gates of zeros


def dead_parameters(subject: Subject) -> str | None:
    """Parameters without a gradient, or gradients that are not finite, in a few passes with small steps between."""
    trainer = subject.trainer
    if is_sharded(trainer.accelerator):
        raise LabError("the model is sharded, and this check needs a whole one.")
    model = trainer.run.model
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = 0 if has_lora(model) else sum(1 for _ in model.parameters()) - len(named)
    if not named:
        return "The model has no trainable parameter."
    idle = architecture_of(subject.config.denoiser).idle_parameters(model, subject.plan.classes is not None)
    probed = [(name, parameter) for name, parameter in named if not name.startswith(idle)]
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
            now = {name for name, parameter in probed if parameter.grad is None or not parameter.grad.any()}
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


class _OneBatch(FixedNoiseObjective):
    """The same timesteps and the same noise at every update."""

    def draw(self, update: int) -> torch.Tensor:
        return super().draw(0)

    def noise(self, update: int, images: torch.Tensor) -> Iterator[torch.Tensor]:
        return super().noise(0, images)


def overfit_one_batch(subject: Subject) -> str:
    """
    Trains on a single batch with the same timesteps and noise, and describes the fall of the loss. Raises a `LabError` if it
    did not fall to half: more data cannot fix that. Restores the trainer. All processes call this.
    """
    trainer, plan = subject.trainer, subject.plan
    batch = next(trainer.batches(subject.config.seed, range(1)))
    losses = []
    with restored_afterwards(trainer):
        trainer.run.objective, trainer.log.observer = _OneBatch.now(trainer, 0, evenly=True), None
        trainer.stepper.model.train()
        set_learning_rate(trainer.run.optimizer, plan.learning_rate)
        for update in range(_SANITY_UPDATES):
            trainer.run.update, trainer.log.sums = update, torch.zeros_like(trainer.log.sums)
            if not do_one_update(trainer, batch):
                raise LabError(
                    f"The sanity run failed: no fp16 gradient was finite at update {update}. Train without "
                    "--mixed_precision fp16, or lower the learning rate."
                )
            if update in (0, _SANITY_UPDATES - 1):
                losses.append(float(trainer.accelerator.gather(trainer.log.sums[None, :1]).mean()))
    first, last = losses
    times = f"seen {_SANITY_UPDATES} times at a learning rate of {plan.learning_rate:.3g}"
    text = f"one batch, {times}: loss {first:.3g}, then {last:.3g}"
    if not last < _SANITY_FALL * first:
        raise LabError(
            f"The sanity run failed: {text}. A model that cannot learn one batch cannot learn more. Check the learning rate "
            "(`lrlab find-lr`), the data and the model."
        )
    return f"Sanity run: {text}."
