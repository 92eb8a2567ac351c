"""The hooks of the launcher, a row for each, from which its parser, checks, `--explain` and page are derived.

A new hook is a file in `hooks/` with the functions of [`installed_hooks.HookModule`], and a row here. A hook's file is
imported when it is used, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.environment import require_extra
from ..core.errors import LabError, warn
from ..core.values import COUNT, Range
from ..core.words import markdown_table
from .host.source import HostScript, NotRecognised, find_faults


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


@dataclass(frozen=True, kw_only=True)
class HookEntry:
    """A row. Hooks are made and installed in the order of the table."""

    module: Any  # a file in `hooks/`, by its name, or what has the functions of a [`HookModule`]
    option: HookOption  # requests the hook
    settings: tuple[HookOption, ...] = ()  # have no effect without `option`, unless `is_always_there`
    extra: str = ""  # which it needs
    is_always_there: bool = False
    must_act: bool = False  # a program where it has nothing to act on is an error without --strict, too

    def is_asked(self, options: argparse.Namespace) -> bool:
        return self.is_always_there or self.option.is_given(options)

    def recognise(self, script: HostScript) -> str:
        return str(self._module.recognise(script))

    def make(self, host: Any) -> Any:
        return self._module.make(host)

    @property
    def _module(self) -> Any:
        is_name = isinstance(self.module, str)
        return importlib.import_module(f"{__package__}.hooks.{self.module}") if is_name else self.module


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


# --- the options of the rows ------------------------------------------------------------------------------------------


def all_options() -> Iterator[tuple[HookEntry, HookOption]]:
    for entry in HOOKS.values():
        for option in (entry.option, *entry.settings):
            yield entry, option


class _Once(argparse._StoreAction):
    """An option whose first value would otherwise be ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            parser.error(f"{option_string} {values}: must be given once, got {first} before. Hint: leave one out")
        super().__call__(parser, namespace, values, option_string)


def add_options(parser: argparse.ArgumentParser) -> None:
    for _, option in all_options():
        kwargs: dict[str, Any] = {"action": "store_true"}
        if option.value_type is not bool:
            kwargs = {"type": option.value_type, "metavar": option.metavar, "action": _Once}
        parser.add_argument(f"--{option.name}", help=option.help, **kwargs)


def check_numbers(options: argparse.Namespace) -> None:
    for _, option in all_options():
        if option.value_type in (int, float):
            option.range.check(f"--{option.name}", getattr(options, option.name), option.help)


def check(options: argparse.Namespace) -> None:
    """Raises a `LabError` for a number out of range, an option without effect, and a package that is not installed."""
    check_numbers(options)
    for entry, option in all_options():
        if option.is_given(options) and not entry.is_always_there and not entry.is_asked(options):
            value, needed = f"--{option.name} {getattr(options, option.name)}", f"--{entry.option.name}"
            raise LabError(f"{value} has no effect without {needed}. Add it, or remove --{option.name}.")
    optional = [entry for entry in HOOKS.values() if not entry.is_always_there]
    if options.strict and not any(entry.is_asked(options) for entry in optional):
        needed = ", ".join(f"--{entry.option.name}" for entry in optional)
        raise LabError(f"--strict has no effect without one of {needed}. Add one, or remove --strict.")
    for entry in HOOKS.values():
        if entry.extra and entry.is_asked(options) and (entry.option.acts_in_range_test or not options.find_lr):
            require_extra(entry.extra, f"--{entry.option.name}")


def options_of_test(options: argparse.Namespace) -> argparse.Namespace:
    """The options that act in a range test. A warning names the others."""
    idle = [option.name for _, option in all_options() if not option.acts_in_range_test and option.is_given(options)]
    if idle:
        warn(f"--find_lr does not train: {', '.join(f'--{name}' for name in idle)} has no effect on the test.")
    return argparse.Namespace(**vars(options) | dict.fromkeys(idle))


def options_table() -> str:
    """All options of the launcher's hooks as a Markdown table."""
    rows = []
    for _, option in all_options():
        value = "" if option.value_type is bool else f" {option.metavar}"
        rows.append((f"`--{option.name}{value}`", option.help, "yes" if option.acts_in_range_test else "–"))
    return markdown_table(("option, before the script's name", "effect", "with `--find_lr`"), rows)


# --- --explain --------------------------------------------------------------------------------------------------------


def recognisers() -> dict[str, Callable[[HostScript], str]]:
    """Functions that describe what an option acts on or raise [`NotRecognised`], by option."""
    return {f"--{entry.option.name}": entry.recognise for entry in HOOKS.values()}


def explain(script: HostScript) -> str:
    """What each option acts on in a script, and faults of its schedule's length, a line each, from its text alone."""
    width = max(map(len, recognisers()))
    lines = [script.path]
    for option, recognise in recognisers().items():
        try:
            found = recognise(script)
        except NotRecognised as reason:
            found = f"not here: {reason}"
        lines.append(f"  {option:<{width}}  {found}")
    return "\n".join([*lines, *(f"By itself, this script {text}" for _, text in find_faults(script))])
