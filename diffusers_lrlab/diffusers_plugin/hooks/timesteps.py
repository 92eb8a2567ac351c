"""Timesteps of a third-party script: observed where it draws them, and replaced by those of a sampler if asked.

Scripts for a `DDPMScheduler` draw indices, `torch.randint(0, num_train_timesteps, (batch_size,))`. Scripts for flow matching
draw numbers `u` in [0, 1), whose index into a table of timesteps, from the most to the least noise, is `floor(u T)`.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...core.errors import LabError
from ...core.spec import choose
from ...core.streams import stream_generator
from ...core.words import counted, times
from ...timesteps.noise_levels import NoiseLevels, flow_levels, is_flow, noise_levels, prediction_type_of
from ...timesteps.registries import TIMESTEP_SAMPLERS
from ...timesteps.sampling import TimestepSampler, contradiction
from ..host.source import DENSITY, HostScript, NotRecognised, lines_of
from ..installed_hooks import Hook, Host
from .clock import HostClock

# Stratified batches smaller than this share their strata with the updates after them.
_STRATA = 64


def recognise(script: HostScript) -> str:
    if script.sampling_pattern == "index":
        return f"torch.randint draws indices of timesteps ({lines_of(script.randint_calls)})"
    table = "least" if script.sigma_scales_data else "most"
    return f"{DENSITY} draws indices into a table that starts with the {table} noise ({lines_of(script.calls(DENSITY))})"


def check_one_loss(script: HostScript) -> None:
    """Raises [`NotRecognised`] if a timestep has several losses, such as those of the two images of a preference."""
    if script.repeated_timesteps:
        lines = lines_of(script.repeated_timesteps)
        raise NotRecognised(f"it uses each timestep for several images ({lines}), whose losses cannot be told apart")


def make(host: Host) -> Hook:
    hook = TimestepHook(
        host.script, host.hooks["clock"], host.options.timestep_sampler, host.given("timesteps", "weighting", "log")
    )
    host.hooks["timesteps"] = hook  # the losses are those of its timesteps
    if hook.follows_losses or hook.is_unbiased:
        host.need("weighting")
    return hook


class TimestepHook:
    """Observes the timesteps that a script draws, and replaces them if there is a sampler."""

    def __init__(self, script: HostScript, clock: HostClock, spec: str | None, requested: str):
        self.script, self.clock, self.run = script, clock, clock.run
        self.option = requested  # options that need it, for messages
        choice = choose(spec, None, TIMESTEP_SAMPLERS) if spec else None
        self.name = choice.name if choice else None
        self.kwargs: dict[str, Any] = choice.kwargs if choice else {}
        self.follows_losses = choice is not None and "feedback" in choice.entry.traits
        self.is_unbiased = bool(self.kwargs.get("unbiased"))
        self.pattern = script.sampling_pattern
        self.sampler: TimestepSampler | None = None
        self.levels: NoiseLevels | None = None  # from the first batch on
        self.scheduler: Any = None
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # noise schedulers, by the script or its pipelines
        self.is_active = True
        self.timesteps: torch.Tensor | None = None  # of the last batch, which grow with the noise: int64 `(batch_size,)`
        self.on_timesteps: list[Callable[[int], None]] = []  # called with the update for each batch
        self.before_update: list[Callable[[int], None]] = []  # called with the update before its first timesteps
        self.num_seen = self._largest_batch = 0
        self.last_update = self._skipped = self._micro_batch = -1  # of the last batch

    def install(self) -> None:
        from diffusers import ConfigMixin

        self.run.patches.wrap(ConfigMixin, "register_to_config", self._remember_scheduler)
        if self.pattern == "density":
            from diffusers import training_utils

            self.run.patches.wrap(training_utils, DENSITY, self._draw_density, self.script.calling(DENSITY))
        else:
            self.run.patches.wrap(torch, "randint", self._draw_index, lambda: self.script.is_at(self.script.randint_calls))

    def _remember_scheduler(self, register: Any, made: Any, /, **kwargs: Any) -> None:
        """Every noise scheduler registers its configuration when it is made."""
        from diffusers import SchedulerMixin

        register(made, **kwargs)
        if isinstance(made, SchedulerMixin):
            self._made.add(made)

    def _draw_index(self, randint: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The script's own draw comes first, so that its generator continues as without the hook.
        own = randint(*args, **kwargs)
        return self._replaced(own) if self._is_known(functools.partial(_is_index_scheduler, num=args[1])) else own

    def _draw_density(self, density: Callable[..., torch.Tensor], /, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn = density(*args, **kwargs)
        if not self._is_known(is_flow):
            return drawn
        num = self.scheduler.config.num_train_timesteps
        own = self._turned((drawn * num).long().clamp(max=num - 1))
        timesteps = self._replaced(own)
        return drawn if timesteps is own else ((self._turned(timesteps) + 0.5) / num).to(drawn.dtype)

    def _replaced(self, own: torch.Tensor) -> torch.Tensor:
        """Timesteps in place of a script's `own`, which is returned itself if nothing is replaced."""
        self.timesteps = self._sampled(own)
        for call in self.on_timesteps:
            call(self.last_update)
        return self.timesteps

    def _turned(self, indices: torch.Tensor) -> torch.Tensor:
        """Timesteps, which grow with the noise, for indices into the script's table, or the reverse."""
        return indices if self.script.sigma_scales_data else self.scheduler.config.num_train_timesteps - 1 - indices

    def _is_known(self, matches: Callable[[Any], bool]) -> bool:
        """Whether the noise scheduler of the timesteps is known, which is looked for at the first batch."""
        if self.levels is None:
            self.run.unless_refused(self, self._begin)(matches)
        return self.is_active

    def _begin(self, matches: Callable[[Any], bool]) -> None:
        """Finds the noise scheduler among those for which `matches(scheduler)` is true: they must agree."""
        found = [scheduler for scheduler in [*self._made] if matches(scheduler)]
        levels = [
            flow_levels(each, self.script.sigma_scales_data) if is_flow(each) else noise_levels(each) for each in found
        ]
        types = map(prediction_type_of, found)
        if len({(str(kind), own.alphas_cumprod.tobytes()) for kind, own in zip(types, levels, strict=True)}) != 1:
            names = ", ".join(sorted({type(scheduler).__name__ for scheduler in found})) or "none"
            raise NotRecognised(f"the noise scheduler of its timesteps is ambiguous or missing; found: {names}")
        self.scheduler, self.levels = found[0], levels[0]
        if self.name is None:
            return
        num_updates = self.clock.count_updates()
        if num_updates is None and "curriculum" in TIMESTEP_SAMPLERS[self.name].traits:
            raise LabError(
                f"--timestep_sampler {self.name!r} changes over the run, whose length the script's arguments do not "
                "determine. Give --num_updates N before its name."
            )
        if warning := contradiction(self.name, self.prediction_type):
            self.run.warn(warning)
        self.sampler = TimestepSampler(self.name, self.kwargs, self.levels, num_updates)

    @property
    def prediction_type(self) -> str:
        return str(prediction_type_of(self.scheduler))

    def _sampled(self, own: torch.Tensor) -> torch.Tensor:
        """The sampler's timesteps; the script's `own`, as they are, without a sampler and for `uniform`."""
        self.num_seen += 1
        update, skipped = self.clock.update, self.run.num_skipped  # a skipped update is drawn again
        micro_batch = self._micro_batch + 1 if (update, skipped) == (self.last_update, self._skipped) else 0
        self.last_update, self._skipped, self._micro_batch = update, skipped, micro_batch
        for call in self.before_update if micro_batch == 0 else ():
            call(update)
        sampler = self.sampler
        if sampler is None or sampler.name == "uniform" and sampler.draw == "independent":
            return own
        size, (accumulation, num_processes, process_index) = len(own), self._layout()
        self._largest_batch = max(self._largest_batch, size, int(self.run.arguments.get("train_batch_size") or 0))
        if micro_batch >= accumulation:
            raise LabError(
                f"The script draws timesteps {times(micro_batch + 1)} in an update of {counted(accumulation, 'micro-batch')}"
                ", so their purposes cannot be told apart. Remove --timestep_sampler."
            )
        batch = self.global_batch()
        window = math.ceil(_STRATA / batch) if sampler.draw == "stratified" else 1
        seed = int(self.run.arguments.get("seed") or 0)
        generator = stream_generator(seed, "timesteps", update // window)
        drawn = sampler.sample(batch * window, update, generator)
        start = update % window * batch + (micro_batch * num_processes + process_index) * self._largest_batch
        return drawn[start : start + size].to(own.device)

    def global_batch(self) -> int:
        """Images of an update, once a batch was drawn."""
        accumulation, num_processes, _ = self._layout()
        return self._largest_batch * accumulation * num_processes

    def check_beginning(self, sampler: TimestepSampler) -> None:
        """
        Refuses a density that cannot begin in this run, and warns if it may not. Called at the first loss, when batches and
        weights are known.
        """
        num_updates = self.clock.count_updates()
        if num_updates is None or sampler.began():
            return
        if warning := sampler.check_length(num_updates, self.global_batch()):
            self.run.warn(warning)

    def _layout(self) -> tuple[int, int, int]:
        """Micro-batches of an update, processes, and the index of this process."""
        accelerator = self.run.accelerator
        return accelerator.gradient_accumulation_steps, accelerator.num_processes, accelerator.process_index

    def loss_weights(self) -> torch.Tensor | None:
        """The weights that correct the last batch for its density, if the sampler is `unbiased`."""
        if self.sampler is None or self.timesteps is None:
            return None
        return self.sampler.loss_weights(self.timesteps, self.last_update)

    def report(self) -> str:
        if self.name is None:
            return ""
        lines = [f"--timestep_sampler {self.name}: timesteps of {counted(self.num_seen, 'batch')} replaced."]
        began, held = (None, "") if self.sampler is None else (self.sampler.began(), self.sampler.held())
        if began is not None:
            when = f"began at update {began:,}" if began else "has not begun: it waits for its warm-up and for losses"
            lines.append(f"Its own density of the timesteps {when}.")
        if held:
            lines.append(f"To keep its last density fixed in another run: --timestep_sampler '{held}'.")
        return "\n".join(lines)


def _is_index_scheduler(scheduler: Any, num: int) -> bool:
    """Whether its timesteps are indices of `alphas_cumprod`: not so for schedulers that interpolate, such as Euler's."""
    has_indices = hasattr(scheduler, "alphas_cumprod") and not hasattr(scheduler, "sigmas")
    return has_indices and scheduler.config.num_train_timesteps == num
