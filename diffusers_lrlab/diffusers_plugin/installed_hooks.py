"""Installs the hooks that the launcher's options request into a script, and reports what they did."""

import argparse
from typing import cast

from ..core.errors import LabError
from .hook_options import options_of_test
from .hook_table import HOOKS, Host, RangeTest
from .hooks.clock import clock_of
from .hooks.find_lr import FindLrHook
from .hooks.lr_scheduler import LrSchedulerHook
from .host.patches import Patches
from .host.run import HostRun
from .host.source import HostScript, NotRecognised


class InstalledHooks:
    """The hooks of a script, installed before its first line. Closing `patches` restores what they replace."""

    def __init__(self, options: argparse.Namespace, range_test: RangeTest | None = None, patches: Patches | None = None):
        options = options_of_test(options) if range_test else options
        self.host = Host(HostScript(options.script), HostRun(options.strict, patches), options, range_test)
        for name, entry in HOOKS.items():
            if entry.is_asked(self.host.options):
                self._make(name)
        self.made = {name: self.host.hooks[name] for name in HOOKS if name in self.host.hooks}
        self.host.run.install()
        for hook in self.made.values():
            hook.install()

    def _make(self, name: str) -> None:
        """Makes a hook, and those that it needs. If it is refused, its option is as if it were not given."""
        host, before = self.host, dict(self.host.hooks)
        try:
            host.need(name)
        except NotRecognised as reason:
            host.hooks = before
            host.run.refuse(host.given(name), reason)
            host.options = argparse.Namespace(**vars(host.options) | {HOOKS[name].option.name: None})

    @property
    def find_lr(self) -> FindLrHook | None:
        """The hook of a range test."""
        return cast(FindLrHook | None, self.made.get("find_lr"))

    @property
    def exit_status(self) -> int:
        """Of a program that has ended well: 1 if it has done more updates than --lr_scheduler has."""
        hook = cast(LrSchedulerHook | None, self.made.get("lr_scheduler"))
        return 0 if hook is None else hook.exit_status

    def check_used(self) -> None:
        """
        After the script's end: a hook that must act and never did is an error; with `--strict`, this holds for every hook.
        """
        clock, run = clock_of(self.host), self.host.run
        if run.error is not None:
            raise run.error
        for name, hook in self.made.items():
            if HOOKS[name].must_act and not hook.num_seen:
                raise LabError(hook.report())
        requested = [hook for name, hook in self.made.items() if not HOOKS[name].is_always_there]
        unused = [text for hook in requested if not hook.num_seen and (text := hook.report())]
        resumed_at_end = clock.counts and clock.update and not run.num_updates
        if unused and run.strict and not resumed_at_end:
            raise LabError(f"{' '.join(unused)} (--strict)")

    def report(self) -> str:
        """The lines of all hooks but those that ended in an error; empty in a range test, which does not train."""
        if self.find_lr is not None:
            return ""
        acted = [hook for name, hook in self.made.items() if hook.num_seen or not HOOKS[name].must_act]
        lines = [line for hook in acted for line in hook.report().splitlines()]
        return "\n".join(f"diffusers_lrlab: {line}" for line in lines)
