"""What the launcher hooks into a script, by its options."""

import argparse
from collections.abc import Callable

from ..core.errors import LabError
from .clock import HostClock
from .ema_hook import EMAHook
from .find_lr_hook import FindLrHook, RangeTest, options_of_test
from .host_run import HostRun
from .host_script import HostScript, NotRecognised
from .log_hook import LogHook
from .optimizer_hook import OptimizerHook
from .resume_hook import ResumeHook
from .timesteps_hook import TimestepHook
from .update_log import UpdateLog
from .validation_hook import ValidationHook, check_options
from .weighting_hook import WeightingHook

_BY_TIMESTEPS = ("timestep_sampler", "loss_weighting", "log_timesteps")
_OF_OPTIMIZER = ("optimizer", "lr_groups")
_ALL = (*_BY_TIMESTEPS, *_OF_OPTIMIZER, "ema", "validation_steps", "exact_resume")


Hook = TimestepHook | WeightingHook | LogHook | OptimizerHook | EMAHook | ValidationHook | ResumeHook


class Hooks:
    """The clock of a script, and what was asked for besides; they are installed before the script's first line."""

    def __init__(self, options: argparse.Namespace, range_test: RangeTest | None = None):
        _check(options)
        options = options_of_test(options) if range_test else options
        self.script = HostScript(options.script)
        self.run = HostRun(options.strict)
        num_updates = None if range_test else options.num_updates  # those of the test are not the run's
        self.clock = HostClock(self.run, options.fix_lr_clock, options.strict_lr_audit, num_updates)
        self.run.install()
        self.clock.compares = range_test is None
        self.clock.install()
        self.updates = UpdateLog(self.clock)
        self.updates.install()
        self.installed: list[Hook] = []
        if asked := _asked(options, _BY_TIMESTEPS):
            self._add(asked, lambda: self._by_timesteps(options, asked))
        if asked := _asked(options, _OF_OPTIMIZER):
            self._add(asked, lambda: [OptimizerHook(self.script, self.run, options.optimizer, options.lr_groups)])
        if options.ema:
            self._add("--ema", lambda: [EMAHook(self.script, self.clock, options.ema, options.ema_swap)])
        if options.validation_steps:
            ema = next((hook for hook in self.installed if isinstance(hook, EMAHook)), None)  # which averages first
            held_out = options.validation_fraction, options.validation_steps
            self._add("--validation_fraction", lambda: [ValidationHook(self.script, self.clock, *held_out, ema)])
        if options.exact_resume:  # after all whose states it saves
            self._add("--exact_resume", lambda: [ResumeHook(self.script, self.clock, [*self.installed])])
        self.find_lr = FindLrHook(self.script, self.run, range_test, options.validation_fraction) if range_test else None
        for hook in [*self.installed, *filter(None, [self.find_lr])]:
            hook.install()

    def _add(self, asked: str, make: Callable[[], list[Hook]]) -> None:
        try:
            self.installed += make()
        except NotRecognised as reason:
            self.run.refuse(asked, reason)

    def _by_timesteps(self, options: argparse.Namespace, asked: str) -> list[Hook]:
        """In the order in which they see a loss, the last one first."""
        timesteps = TimestepHook(self.script, self.clock, options.timestep_sampler, asked)
        hooks: list[Hook] = [timesteps]
        if options.loss_weighting or timesteps.is_unbiased:
            hooks.append(WeightingHook(self.script, self.clock, timesteps, options.loss_weighting))
        if options.log_timesteps:
            hooks.append(LogHook(self.script, self.clock, timesteps, options.timestep_grad_every))
        return hooks

    def check_used(self) -> None:
        """After the script's end: with `--strict`, a hook that had nothing to act on is an error."""
        unused = [hook.report() for hook in self.installed if not hook.num_seen]
        resumed_at_end = self.clock.counts and self.clock.update and not self.run.num_updates
        if unused and self.run.strict and not resumed_at_end:
            raise LabError(f"{' '.join(filter(None, unused))} (--strict)")

    def report(self) -> str:
        """What was audited, drawn, weighed, averaged and logged, a line each."""
        if self.find_lr is not None:
            return ""  # the audit and all else is of trainings
        lines = [self.updates.report(), *(hook.report() for hook in self.installed)]
        return "\n".join([self.clock.report(), *(f"diffusers_lrlab: {line}" for line in lines if line)])


def _asked(options: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Which of these options were given, in words."""
    return " and ".join(f"--{name}" for name in names if getattr(options, name))


def _check(options: argparse.Namespace) -> None:
    """Options that change others need these."""
    if options.strict and not (_asked(options, _ALL) or options.find_lr):
        needed = ", ".join(f"--{name}" for name in _ALL)
        raise LabError(f"--strict has no effect without one of {needed}. Leave it out, or add one.")
    for name, needed in (("timestep_grad_every", "log_timesteps"), ("ema_swap", "ema")):
        if getattr(options, name) is not None and not getattr(options, needed):
            raise LabError(f"--{name} {getattr(options, name)} has no effect without --{needed}. Add it, or leave it out.")
    check_options(options.validation_fraction, options.validation_steps, options.find_lr)
