"""A script with the hooks that the launcher's options request: made, installed before its first line, and reported on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import LabError
from .hook_table import HOOKS, options_of_test
from .host.run import HostRun
from .host.source import HostScript, NotRecognised

if TYPE_CHECKING:
    from .host.patches import Patches


class Hook(Protocol):
    """A change to a running script."""

    @property
    def num_seen(self) -> int:
        """How often it had something to act on; 0 is an error with `--strict`."""
        ...

    def install(self) -> None:
        """Runs before the script's first line. All replacements go through `run.patches`, which restores them."""
        ...

    def report(self) -> str:
        """Lines for the end of the run; empty if there is nothing to say."""
        ...


class HookModule(Protocol):
    """The functions of a hook's file."""

    def recognise(self, script: HostScript) -> str:
        """What the hook acts on, in words; raises [`NotRecognised`] with the reason if there is nothing."""
        ...

    def make(self, host: Host) -> Hook:
        """The hook; raises [`NotRecognised`]."""
        ...


class Host:
    """The script whose training the hooks change. Closing `patches` restores what they replace."""

    def __init__(self, options: argparse.Namespace, range_test: Any = None, patches: Patches | None = None):
        self.script = HostScript(options.script)  # in which hooks recognise their calls
        self.run = HostRun(options.strict, patches)  # in this process
        self.options = options_of_test(options) if range_test else options  # of the launcher
        self.range_test = range_test  # a [`finder.find.ScriptTest`], which decides on learning rates
        self.hooks: dict[str, Any] = {}  # of type `Hook`, by the names of their rows
        for name, entry in HOOKS.items():
            if entry.is_asked(self.options):
                self._make(name)
        self.hooks = {name: self.hooks[name] for name in HOOKS if name in self.hooks}  # in the order of the table
        self.run.install()
        for hook in self.hooks.values():
            hook.install()

    def _make(self, name: str) -> None:
        """Makes a hook, and those that it needs. If it is refused, its option is as if it were not given."""
        before = dict(self.hooks)
        try:
            self.need(name)
        except NotRecognised as reason:
            self.hooks = before
            self.run.refuse(self.given(name), reason)
            self.options = argparse.Namespace(**vars(self.options) | {HOOKS[name].option.name: None})

    def need(self, name: str) -> Any:
        """The hook of a row, also for another hook that acts through it."""
        if name not in self.hooks:
            self.hooks[name] = HOOKS[name].make(self)
        return self.hooks[name]

    def given(self, *names: str) -> str:
        """The given options of these rows, such as `"--timestep_sampler and --loss_weighting"`."""
        options = [HOOKS[name].option for name in names]
        return " and ".join(f"--{option.name}" for option in options if option.is_given(self.options))

    @property
    def exit_status(self) -> int:
        """Of a program that has ended well: 1 if it has done more updates than --lr_scheduler has."""
        return getattr(self.hooks.get("lr_scheduler"), "exit_status", 0)

    def check_used(self) -> None:
        """
        After the script's end: a hook that must act and never did is an error; with `--strict`, this holds for every hook.
        """
        if self.run.error is not None:
            raise self.run.error
        for name, hook in self.hooks.items():
            if HOOKS[name].must_act and not hook.num_seen:
                raise LabError(hook.report())
        requested = [hook for name, hook in self.hooks.items() if not HOOKS[name].is_always_there]
        unused = [text for hook in requested if not hook.num_seen and (text := hook.report())]
        clock = self.hooks["clock"]
        resumed_at_end = clock.counts and clock.update and not self.run.num_updates
        if unused and self.run.strict and not resumed_at_end:
            raise LabError(f"{' '.join(unused)} (--strict)")

    def report(self) -> str:
        """The lines of all hooks but those that ended in an error; empty in a range test, which does not train."""
        if self.range_test is not None:
            return ""
        acted = [hook for name, hook in self.hooks.items() if hook.num_seen or not HOOKS[name].must_act]
        lines = [line for hook in acted for line in hook.report().splitlines()]
        return "\n".join(f"diffusers_lrlab: {line}" for line in lines)
