"""What the launcher hooks into a script, by its options."""

import argparse

from ..core.errors import LabError
from .clock import HostClock
from .host_script import HostScript, NotRecognised
from .timesteps_hook import TimestepHook
from .weighting_hook import WeightingHook


class Hooks:
    """The clock of a script, and what was asked for besides; they are installed before the script's first line."""

    def __init__(self, options: argparse.Namespace):
        if options.strict and not (options.timestep_sampler or options.loss_weighting):
            raise LabError(
                "--strict has no effect without --timestep_sampler or --loss_weighting. Leave it out, or add one."
            )
        self.clock = HostClock(options.fix_lr_clock, options.strict_lr_audit, options.num_updates, options.strict)
        self.clock.install()
        self.timesteps: TimestepHook | None = None
        self.weighting: WeightingHook | None = None
        if options.timestep_sampler or options.loss_weighting:
            self._hook_timesteps(HostScript(options.script), options.timestep_sampler, options.loss_weighting)

    def _hook_timesteps(self, script: HostScript, sampler: str | None, weighting: str | None) -> None:
        asked = " and ".join(
            name for name, spec in (("--timestep_sampler", sampler), ("--loss_weighting", weighting)) if spec
        )
        try:
            timesteps = TimestepHook(script, self.clock, sampler)
            if weighting or timesteps.is_unbiased:
                self.weighting = WeightingHook(script, self.clock, timesteps, weighting)
        except NotRecognised as reason:
            self.clock.refuse(asked, reason)
            return
        self.timesteps = timesteps
        timesteps.install()
        if self.weighting is not None:
            self.weighting.install()

    def report(self) -> str:
        """What was audited, drawn and weighed, a line each."""
        lines = [hook.report() for hook in (self.timesteps, self.weighting) if hook is not None]
        return "\n".join([self.clock.report(), *(f"diffusers_lrlab: {line}" for line in lines if line)])
