"""Checks of the settings of a run."""

import json
import math
from pathlib import Path

import numpy as np
import torch

from ..core.streams import stream_generator
from ..core.words import counted
from ..finder.result import read_saved_result
from ..objective.process import make_process
from ..optimizers.entries import OPTIMIZERS
from ..optimizers.timescales import NO_EFFECT, SHORT
from ..training.choices import has_chosen_decay, resolved_parameters
from .subject import Subject

_SMALL_MODEL = 5_000_000  # parameters
# Usual rates for AdamW, for small and for larger models.
_USUAL = {True: (1e-4, 1e-3), False: (1e-4, 3e-4)}


def timesteps(subject: Subject) -> str | None:
    """Timesteps that are not integers, or out of range."""
    sampler, last = subject.run.objective.sampler, subject.run.process.num_train_timesteps - 1
    for update in (0, subject.plan.num_updates // 2, subject.plan.num_updates - 1):
        device = subject.trainer.accelerator.device
        drawn = sampler.sample(1000, update, stream_generator(0, "preflight", update, device=device))
        if drawn.dtype != torch.int64 or not 0 <= int(drawn.min()) <= int(drawn.max()) <= last:
            return (
                f"The sampler {subject.config.timestep_sampler!r} draws timesteps of {drawn.dtype} from {drawn.min()} to "
                f"{drawn.max()} at update {update}; it must draw int64 timesteps from 0 to {last}."
            )
    return None


def terminal_snr(subject: Subject) -> str | None:
    """
    A process that does not end in pure noise, from which samples start (arXiv 2305.08891). Not reported for the default
    noise levels, whose cost is documented: a first run should warn only of the user's choices.
    """
    config, process = subject.config, subject.run.process
    snr = float(process.levels.snr[-1])
    if snr <= 0.01:
        return None
    usual = resolved_parameters(config, config.objective, {})
    of_default = make_process(config.objective, is_bounded=subject.plan.kind.is_bounded, **usual).levels
    if np.array_equal(process.levels.alphas_cumprod, of_default.alphas_cumprod):
        return None
    return (
        f"The last of {counted(process.num_train_timesteps, 'timestep')} has a signal-to-noise ratio of {snr:.2g}, but "
        "samples start from pure noise, which the model never sees: they will miss outlying data. "
        f"{process.terminal_noise_hint}"
    )


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


def ema_memory(subject: Subject) -> str | None:
    """An EMA that still remembers the beginning of the run at its end."""
    config, num_updates = subject.config, subject.plan.num_updates
    if not config.use_ema or num_updates < 20:
        return None
    early, every = num_updates // 10, subject.plan.ema_form.update_every
    weight = float(np.prod(subject.plan.ema_form.decays(num_updates)[early:]))
    if weight < 0.2:
        return None
    if every > num_updates / 20:
        return (
            f"The EMA is updated every {every} of {counted(num_updates, 'update')}: at the end, {100 * weight:.0f} % "
            "of the averaged weights will be those of the first tenth of the run. "
            "Lower update_every of --ema."
        )
    proposed = math.exp(math.log(0.02) * every / (0.9 * num_updates))
    remedy = f"--ema_max_decay {proposed:.4g}, or the usual --ema_power and --ema_inv_gamma"
    if subject.plan.ema_form.name == "half_life":
        seen = num_updates * subject.plan.layout.global_batch
        remedy = f"a half-life of {0.9 * seen * math.log(2) / math.log(50):.3g} {subject.plan.kind.name} in --ema"
    elif config.ema is not None:
        remedy = f"a decay of {proposed:.4g} in --ema, or --ema power_function, whose memory grows with the run"
    return (
        f"At the end, {100 * weight:.0f} % of the averaged weights will be those of the first tenth of "
        f"{counted(num_updates, 'update')}: the EMA's memory is longer than the run. Use {remedy}."
    )


def warmup_share(subject: Subject) -> str | None:
    warmup, num_updates = subject.plan.warmup_updates, subject.plan.num_updates
    if warmup <= num_updates / 4:
        return None
    return (
        f"Warm-up takes {warmup} of {counted(num_updates, 'update')}; about 5 % is usual. Give --lr_warmup_steps as a "
        "fraction, such as 0.05."
    )


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


def weight_decay(subject: Subject) -> str | None:
    """
    A weight decay that does nothing in a run of this length, or leaves only its end. The default weight decay is not
    reported.
    """
    config, plan, timescale = subject.config, subject.plan, subject.plan.decay_timescale
    if timescale is None or not has_chosen_decay(config):
        return None
    if timescale.removed >= NO_EFFECT and timescale.updates >= SHORT * plan.num_updates:
        return None
    images = plan.num_updates * plan.layout.global_batch
    remedy = f"Use tau={images:.3g} of --optimizer, the {plan.kind.name} of the run, or a weight decay of 0."
    rates = f"At the learning rate {plan.learning_rate:.3g} and weight decay {plan.optimizer_kwargs['weight_decay']:.3g}"
    return f"{rates}, {timescale.in_words(plan.num_updates)}. {remedy}"


def times_seen(subject: Subject) -> str | None:
    epochs = subject.plan.num_epochs
    if epochs is None or epochs <= 1000:
        return None
    things = subject.plan.kind.name
    return (
        f"Each of the {subject.plan.num_images} {things} will be seen {epochs:,.0f} times: expect the model to repeat them. "
        "Use fewer updates or more data, or watch for the update at which the held-out loss begins to rise."
    )
