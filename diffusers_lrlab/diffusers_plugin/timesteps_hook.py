"""Timesteps of a script that is not ours: seen where it draws them, and drawn by a sampler of the registry if asked.

Scripts for a `DDPMScheduler` draw indices, `torch.randint(0, num_train_timesteps, (batch_size,))`. Those for flow matching
draw numbers `u` in [0, 1), whose places in a table of timesteps, from the most to the least noise, are `floor(u T)`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import LabError
from ..core.spec import resolve_spec
from ..core.streams import stream_generator
from ..core.words import counted, times
from ..timesteps.noise_levels import NoiseLevels, flow_levels, is_flow, noise_levels, prediction_type_of
from ..timesteps.registries import TIMESTEP_SAMPLERS
from ..timesteps.sampling import TimestepSampler, contradiction
from .clock import HostClock, clock_of
from .host import Host, StatefulHook
from .host_script import DENSITY, HostScript, NotRecognised, called_in, find_scheduler


def recognise(script: HostScript) -> str:
    """Where a script draws its timesteps; [`NotRecognised`] if it does so in no way, or in a way that cannot be hooked."""
    if script.form == "index":
        return f"torch.randint draws indices of timesteps ({called_in(script.index_draws)})"
    table = "least" if script.sigma_is_of_data else "most"
    return f"{DENSITY} draws places in a table from the {table} noise on ({called_in(script.density_draws)})"


def check_one_loss(script: HostScript) -> None:
    """Raises [`NotRecognised`] where a timestep has several losses, as of the two images of a preference."""
    if script.repeated_draws:
        lines = called_in(script.repeated_draws)
        raise NotRecognised(f"it uses each timestep for several images ({lines}), whose losses cannot be told apart")


# Stratified draws of small batches are spread over as many updates as give this many draws.
_STRATA = 64


def make(host: Host) -> StatefulHook:
    return TimestepHook(host.script, clock_of(host), host.options.timestep_sampler, host.asked)


class TimestepHook:
    """
    Sees the timesteps that a script draws, and replaces them if there is a sampler.

    Attributes:
        asked: The options that need it, for messages.
        timesteps: What the script drew last, as timesteps that grow with the noise: int64 of shape `(batch_size,)`.
        levels: The noise of each timestep, known from the first draw on.
        on_draw: Called with the update after each draw.
    """

    def __init__(self, script: HostScript, clock: HostClock, spec: str | None, asked: str):
        self.script, self.clock, self.run, self.asked = script, clock, clock.run, asked
        self.name: str | None = None
        self.kwargs: dict[str, Any] = {}
        if spec:
            self.name, self.kwargs = resolve_spec(spec, None, TIMESTEP_SAMPLERS)
        if self.name and "feedback" in TIMESTEP_SAMPLERS[self.name].traits:
            raise LabError(
                f"--timestep_sampler {self.name!r} follows the losses of single images, which a script does not show. "
                "Choose one that does not."
            )
        self.form = script.form
        self.sampler: TimestepSampler | None = None
        self.levels: NoiseLevels | None = None
        self.scheduler: Any = None
        self.is_active = True
        self.timesteps: torch.Tensor | None = None
        self.on_draw: list[Callable[[int], None]] = []
        self.num_seen = self._largest_batch = 0
        self._update = self._skipped = self._micro_batch = -1  # of the last draw

    def install(self) -> None:
        if self.form == "density":
            from diffusers import training_utils

            self.run.patches.wrap(training_utils, DENSITY, self._draw_density)
        else:
            self.run.patches.wrap(torch, "randint", self._draw_index)

    def _draw_index(self, randint: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        # First the script's own, from its generator: its other numbers stay the same.
        drawn = randint(*args, **kwargs)
        frame = self.script.caller(self.script.index_draws)
        if frame is None or not self._begun(frame, functools.partial(_is_of_indices, num=args[1])):
            return drawn
        self.timesteps = self._drawn_by_sampler(drawn)
        self._notify()
        return self.timesteps

    def _draw_density(self, density: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn = density(*args, **kwargs)
        frame = self.script.caller(self.script.density_draws)
        if frame is None or not self._begun(frame, is_flow):
            return drawn
        num = self.scheduler.config.num_train_timesteps
        own = self._turned((drawn * num).long().clamp(max=num - 1))
        self.timesteps = self._drawn_by_sampler(own)
        self._notify()
        return drawn if self.timesteps is own else ((self._turned(self.timesteps) + 0.5) / num).to(drawn.dtype)

    def _notify(self) -> None:
        for call in self.on_draw:
            call(self._update)

    def _turned(self, places: torch.Tensor) -> torch.Tensor:
        """Timesteps, which grow with the noise, of places in the script's table, or the other way round."""
        return places if self.script.sigma_is_of_data else self.scheduler.config.num_train_timesteps - 1 - places

    def _begun(self, frame: Any, matches: Callable[[Any], bool]) -> bool:
        """At the first draw finds the scheduler; whether this script's draws are understood."""
        if self.levels is None and self.is_active:
            try:
                self._begin(find_scheduler(frame, matches))
            except NotRecognised as reason:
                self.is_active = False
                self.run.refuse(self.asked, reason)
        return self.is_active

    def _begin(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.levels = flow_levels(scheduler, self.script.sigma_is_of_data) if is_flow(scheduler) else noise_levels(scheduler)
        if self.name is None:
            return
        num_updates = self.clock.count_updates()
        if num_updates is None and "curriculum" in TIMESTEP_SAMPLERS[self.name].traits:
            raise LabError(
                f"--timestep_sampler {self.name!r} moves over the run, whose length does not follow from the script's "
                "arguments. Give --num_updates N before its name."
            )
        self.sampler = TimestepSampler(self.name, self.kwargs, self.levels, num_updates)
        if warning := contradiction(self.name, self.prediction_type):
            self.run.warn(warning)

    @property
    def is_unbiased(self) -> bool:
        return bool(self.kwargs.get("unbiased"))

    @property
    def prediction_type(self) -> str:
        return str(prediction_type_of(self.scheduler))

    def _drawn_by_sampler(self, own: torch.Tensor) -> torch.Tensor:
        """Timesteps in place of the script's `own`, which are returned as they are without a sampler or by `uniform`."""
        self.num_seen += 1
        update, skipped = self.clock.update, self.run.num_skipped  # one that was left out is drawn again
        micro_batch = self._micro_batch + 1 if (update, skipped) == (self._update, self._skipped) else 0
        self._update, self._skipped, self._micro_batch = update, skipped, micro_batch
        sampler = self.sampler
        if sampler is None or sampler.name == "uniform" and sampler.draw == "independent":
            return own
        accelerator, size = self.run.accelerator, len(own)
        accumulation, num_processes = accelerator.gradient_accumulation_steps, accelerator.num_processes
        self._largest_batch = max(self._largest_batch, size, int(self.run.arguments.get("train_batch_size") or 0))
        if micro_batch >= accumulation:
            raise LabError(
                f"The script draws timesteps {times(micro_batch + 1)} in one update, where "
                f"{counted(accumulation, 'micro-batch')} were expected. --timestep_sampler cannot tell what each draw is "
                "for: leave it out."
            )
        batch = self._largest_batch * accumulation * num_processes
        # Strata of one batch of 1 would be none, so that small batches share theirs with the updates after them.
        window = math.ceil(_STRATA / batch) if sampler.draw == "stratified" else 1
        generator = stream_generator(int(self.run.arguments.get("seed") or 0), "timesteps", update // window)
        drawn = sampler.sample(batch * window, update, generator)
        start = update % window * batch + (micro_batch * num_processes + accelerator.process_index) * self._largest_batch
        return drawn[start : start + size].to(own.device)

    def loss_weights(self) -> torch.Tensor | None:
        """What makes up for the density at the last draw, if the sampler is `unbiased`."""
        if self.sampler is None or self.timesteps is None:
            return None
        return self.sampler.loss_weights(self.timesteps, self._update)

    def state_dict(self, is_at_end: bool) -> dict[str, int]:
        """For a checkpoint from which a resume is exact: what strata are laid out by."""
        return {"largest_batch": self._largest_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._largest_batch = state.get("largest_batch", 0)

    def report(self) -> str:
        if self.name is None:
            return ""
        seen = f"{self.num_seen} draws of timesteps" if self.num_seen else "no draw of timesteps"
        return f"--timestep_sampler {self.name}: {seen} replaced."


def _is_of_indices(scheduler: Any, num: int) -> bool:
    """Whether its timesteps are places in `alphas_cumprod`: not so for those that interpolate, such as Euler's."""
    has_indices = hasattr(scheduler, "alphas_cumprod") and not hasattr(scheduler, "sigmas")
    return has_indices and scheduler.config.num_train_timesteps == num
