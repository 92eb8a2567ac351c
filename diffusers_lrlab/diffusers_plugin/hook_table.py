"""The launcher's hooks, a row each: parser, checks, `--explain`, range tests and the page of the launcher follow from it.

A new hook is a file with `recognise(script)` and `make(host)`, as [`host.Hook`] describes them, and a row here. Nothing is
imported for a row that is not used, so that `--help` stays fast.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.ranges import COUNT, Range

if TYPE_CHECKING:
    import argparse

    from .host.hook import Hook, Host
    from .script.source import HostScript


@dataclass(frozen=True, kw_only=True)
class HookOption:
    """An option of the launcher, which stands before the script's name."""

    name: str
    help: str
    kind: type = str  # of its value; bool for a switch
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    range: Range = COUNT  # of numbers
    needs: str | None = None  # another option, without which it has no effect
    acts_in_range_test: bool = False  # else --find_lr leaves it out, and says so

    def is_given(self, options: argparse.Namespace) -> bool:
        return getattr(options, self.name) not in (None, False)

    def check(self, value: Any) -> None:
        """Raises a `LabError` for a number out of range."""
        if self.kind in (int, float):
            self.range.check(f"--{self.name}", value, self.help)


@dataclass(frozen=True, kw_only=True)
class HookEntry:
    """
    A row. Its place in the table is the order in which hooks are made and installed: a later one wraps an earlier one.

    Functions are given as "module:name", of this room, or as themselves.
    """

    make: str | Callable[[Host], Hook | None]  # `None` if there is nothing to do
    recognise: str | Callable[[HostScript], str] | None = None
    options: tuple[HookOption, ...] = ()  # each of which asks for the hook
    settings: tuple[HookOption, ...] = ()  # which have no effect without one of `options`, unless the hook is always there
    needs: tuple[str, ...] = ()  # earlier rows, which are made too, or none of them is
    also_for: tuple[str, ...] = ()  # options of other rows, for which it may have something to do
    packages: tuple[str, ...] = ()  # of the extra "train"
    is_always_there: bool = False

    @property
    def title(self) -> str:
        """As `--explain` names it."""
        return ", ".join(f"--{option.name}" for option in self.options)

    def is_asked(self, options: argparse.Namespace) -> bool:
        asking = (*(option.name for option in self.options), *self.also_for)
        return self.is_always_there or any(getattr(options, name) not in (None, False) for name in asking)

    def find(self, script: HostScript) -> str:
        """What the hook acts on in a script; [`NotRecognised`] says why there is nothing."""
        assert self.recognise is not None
        return str(_resolved(self.recognise)(script))

    def made(self, host: Host) -> Hook | None:
        hook: Hook | None = _resolved(self.make)(host)
        return hook


def _resolved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    return pkgutil.resolve_name(f"{__package__}.{function}") if isinstance(function, str) else function


_TEST = (
    "Do not train: raise the learning rate over the first updates, and suggest one by the losses of batches; with "
    "--validation_fraction, by that of what is held back."
)

HOOKS: dict[str, HookEntry] = {
    "clock": HookEntry(
        recognise="hooks.clock:recognise",
        make="hooks.clock:make",
        is_always_there=True,
        options=(
            HookOption(
                name="fix_lr_clock",
                kind=bool,
                help="Give the schedule the script's real number of updates, and one step per update.",
            ),
        ),
        settings=(
            HookOption(
                name="strict_lr_audit", kind=bool, help="Make a learning rate or momentum other than expected an error."
            ),
            HookOption(
                name="num_updates",
                kind=int,
                metavar="N",
                help="Updates of the run, if they do not follow from the script's arguments; of the test, with --find_lr "
                "(200).",
                acts_in_range_test=True,
            ),
        ),
    ),
    "updates": HookEntry(make="hooks.update_log:make", is_always_there=True),
    "timesteps": HookEntry(
        recognise="hooks.timesteps:recognise",
        make="hooks.timesteps:make",
        options=(
            HookOption(
                name="timestep_sampler",
                metavar="SPEC",
                help="Draw timesteps by this sampler, where the script draws them.",
                acts_in_range_test=True,
            ),
        ),
    ),
    # After "timesteps", so that the log, which is last, sees a loss before it is weighted.
    "weighting": HookEntry(
        recognise="hooks.weighting:recognise",
        make="hooks.weighting:make",
        needs=("timesteps",),
        also_for=("timestep_sampler",),
        options=(
            HookOption(
                name="loss_weighting",
                metavar="SPEC",
                help="Weigh the loss of each image by its noise level.",
                acts_in_range_test=True,
            ),
        ),
    ),
    "log": HookEntry(
        recognise="hooks.log:recognise",
        make="hooks.log:make",
        needs=("timesteps",),
        packages=("matplotlib", "pyarrow"),
        options=(
            HookOption(
                name="log_timesteps",
                kind=bool,
                help="Log losses and draws by noise level, into lrlab/ of --output_dir.",
            ),
        ),
        settings=(
            HookOption(
                name="timestep_grad_every",
                kind=int,
                metavar="N",
                help="Updates between measurements of gradient norms by noise level, for --log_timesteps; off if not given.",
            ),
        ),
    ),
    "ema": HookEntry(
        recognise="hooks.ema:recognise",
        make="hooks.ema:make",
        options=(
            HookOption(
                name="ema",
                metavar="SPEC",
                help="Average what is trained, a LoRA too, into lrlab/ema of --output_dir and of checkpoints.",
            ),
        ),
        settings=(
            HookOption(
                name="ema_swap",
                choices=("validation", "final", "both"),
                help="Where the average takes the place of the weights: validation, final (what the script saves at its "
                "end), both.",
            ),
        ),
    ),
    "validation": HookEntry(  # after "ema", whose average it measures
        recognise="hooks.validation:recognise",
        make="hooks.validation:make",
        options=(
            HookOption(
                name="validation_steps",
                kind=int,
                metavar="N",
                needs="validation_fraction",
                help="Compute the loss of what is held back every N updates.",
            ),
        ),
        settings=(
            HookOption(
                name="validation_fraction",
                kind=float,
                metavar="F",
                range=Range("(0, 0.2]"),
                help="Hold this part of the script's data back, and never train on it. Needs --validation_steps or "
                "--find_lr.",
                acts_in_range_test=True,
            ),
        ),
    ),
    "resume": HookEntry(
        recognise="hooks.resume:recognise",
        make="hooks.resume:make",
        options=(
            HookOption(
                name="exact_resume",
                kind=bool,
                help="Make its own --resume_from_checkpoint go on to the same bits: data, random states, whole checkpoints.",
            ),
        ),
    ),
    "optimizer": HookEntry(
        recognise="hooks.optimizer:recognise",
        make="hooks.optimizer:make",
        options=(
            HookOption(
                name="optimizer",
                metavar="SPEC",
                help="Train with this optimizer in place of the script's, on its groups of parameters.",
                acts_in_range_test=True,
            ),
            HookOption(
                name="lr_groups",
                metavar="PATTERNS",
                help="Factors on the learning rate, by patterns of parameters' names, such as 'text_encoder*=0.1,*.bias=2'.",
                acts_in_range_test=True,
            ),
        ),
    ),
    "find_lr": HookEntry(
        recognise="hooks.find_lr:recognise",
        make="hooks.find_lr:make",
        packages=("matplotlib", "scipy"),
        options=(HookOption(name="find_lr", kind=bool, help=_TEST, acts_in_range_test=True),),
    ),
}
"""By name, in the order in which the hooks are installed."""
