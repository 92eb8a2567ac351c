"""What a hook of the launcher is, and a row for each, from which its parser, checks, `--explain` and page are derived.

A new hook is a file in `hooks/` with the functions of [`HookModule`], and a row here. A hook's file is imported when it is
used, so that `--help` stays fast.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..core.values import COUNT, Range

if TYPE_CHECKING:
    import argparse

    from torch.optim import Optimizer

    from .host.run import HostRun
    from .host.source import HostScript


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


class RangeTest(Protocol):
    """A learning rate range test, such as [`finder.script_test.ScriptTest`]."""

    @property
    def most_updates(self) -> int: ...
    @property
    def lr(self) -> float: ...
    def begin(self, optimizer: Optimizer) -> None: ...
    def add(self, loss: float) -> bool: ...
    def fail(self) -> None: ...


@dataclass
class Host:
    """The program whose training the hooks change."""

    script: HostScript  # in which hooks recognise their calls
    run: HostRun  # in this process
    options: argparse.Namespace  # of the launcher; in a range test, without those that have no effect there
    range_test: RangeTest | None = None  # decides on learning rates
    hooks: dict[str, Hook] = field(default_factory=dict)  # made so far, by the names of their rows

    def need(self, name: str) -> Hook | None:
        """The hook of a row, for another hook that acts through it."""
        if name not in self.hooks and (hook := HOOKS[name].make(self)) is not None:
            self.hooks[name] = hook
        return self.hooks.get(name)

    def given(self, *names: str) -> str:
        """The given options of these rows, such as `"--timestep_sampler and --loss_weighting"`."""
        options = [HOOKS[name].option for name in names]
        return " and ".join(f"--{option.name}" for option in options if option.is_given(self.options))


class HookModule(Protocol):
    """The functions of a hook's file."""

    def recognise(self, script: HostScript) -> str:
        """What the hook acts on, in words; raises [`NotRecognised`] with the reason if there is nothing."""
        ...

    def make(self, host: Host) -> Hook | None:
        """The hook, or `None` if it has nothing to do; raises [`NotRecognised`]."""
        ...


@dataclass(frozen=True)
class HookOption:
    """An option of the launcher, which is given before the script's name."""

    name: str
    help: str
    value_type: type = str  # bool for a switch
    metavar: str | None = None
    range: Range = COUNT  # of numbers
    acts_in_range_test: bool = False  # otherwise --find_lr drops it with a message

    def is_given(self, options: argparse.Namespace) -> bool:
        return getattr(options, self.name) not in (None, False)

    def check(self, value: Any) -> None:
        """Raises a `LabError` for a number out of range."""
        if self.value_type in (int, float):
            self.range.check(f"--{self.name}", value, self.help)


@dataclass(frozen=True, kw_only=True)
class HookEntry:
    """A row. Hooks are made and installed in the order of the table."""

    module: str | HookModule  # a file in `hooks/`
    option: HookOption  # requests the hook
    settings: tuple[HookOption, ...] = ()  # have no effect without `option`, unless `is_always_there`
    extra: str = ""  # which it needs
    is_always_there: bool = False
    must_act: bool = False  # a program where it has nothing to act on is an error without --strict, too

    def is_asked(self, options: argparse.Namespace) -> bool:
        return self.is_always_there or self.option.is_given(options)

    def recognise(self, script: HostScript) -> str:
        return self._module.recognise(script)

    def make(self, host: Host) -> Hook | None:
        return self._module.make(host)

    @property
    def _module(self) -> HookModule:
        if not isinstance(self.module, str):
            return self.module
        return cast("HookModule", importlib.import_module(f"{__package__}.hooks.{self.module}"))


def _switch(name: str, help: str, acts_in_range_test: bool = False) -> HookOption:
    return HookOption(name, help, value_type=bool, acts_in_range_test=acts_in_range_test)


def _spec(name: str, help: str, acts_in_range_test: bool = False) -> HookOption:
    return HookOption(name, help, metavar="SPEC", acts_in_range_test=acts_in_range_test)


_NUM_UPDATES = (
    "Updates of the run, if the script's arguments do not determine them; with --find_lr, updates of the test (200)."
)
_WARMUP = "Warm-up of --lr_scheduler, in updates, or below 1 as a fraction of the run (0)."

HOOKS: dict[str, HookEntry] = {
    "clock": HookEntry(
        module="clock",
        is_always_there=True,
        option=_switch(
            "fix_lr_clock", "Give the schedule the script's real number of updates, and step it once per update."
        ),
        settings=(
            _switch("strict_lr_audit", "Stop with an error if a learning rate or momentum is not as expected."),
            HookOption("num_updates", _NUM_UPDATES, value_type=int, metavar="N", acts_in_range_test=True),
        ),
    ),
    "lr_scheduler": HookEntry(
        module="lr_scheduler",
        must_act=True,
        option=_spec("lr_scheduler", "Replace the scheduler of any torch program by this one, or give it one."),
        settings=(HookOption("num_warmup_steps", _WARMUP, value_type=float, metavar="W", range=Range("[0, inf)")),),
    ),
    "timesteps": HookEntry(
        module="timesteps",
        option=_spec(
            "timestep_sampler", "Replace the script's timesteps by those of this sampler.", acts_in_range_test=True
        ),
    ),
    "weighting": HookEntry(
        module="losses",
        option=_spec("loss_weighting", "Weight each image's loss by its noise level.", acts_in_range_test=True),
    ),
    "log": HookEntry(
        module="log",
        extra="plots",
        option=_switch("log_timesteps", "Log losses and timesteps by noise level to lrlab/ in --output_dir."),
    ),
    "ema": HookEntry(
        module="ema",
        option=_spec("ema", "Average the trained weights, LoRA included, into lrlab/ema in --output_dir."),
    ),
    "optimizer": HookEntry(
        module="optimizer",
        option=_spec(
            "optimizer",
            "Replace the script's optimizer by this one, with the same parameter groups.",
            acts_in_range_test=True,
        ),
    ),
    "find_lr": HookEntry(
        module="find_lr",
        extra="train",
        option=_switch(
            "find_lr",
            "Instead of training, raise the learning rate over the first updates, and suggest one by the losses.",
            acts_in_range_test=True,
        ),
    ),
}
"""By name, in the order in which the hooks are installed."""
