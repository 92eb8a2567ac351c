"""The protocol of the launcher's hooks, and the host that they are made from."""

import argparse
from dataclasses import dataclass, field
from typing import Protocol

from torch.optim import Optimizer

from ..script.source import HostScript
from .run import HostRun


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
    """A learning rate range test, such as [`finder.find.ScriptTest`]."""

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
    hooks: dict[str, Hook] = field(default_factory=dict)  # of earlier rows, by name; later ones follow
    requested: str = ""  # options for which the next hook is made, such as "--timestep_sampler and --loss_weighting"


class HookModule(Protocol):
    """The functions of a hook's file. Rows without options need no `recognise`."""

    def recognise(self, script: HostScript) -> str:
        """What the hook acts on, in words; raises [`NotRecognised`] with the reason if there is nothing."""
        ...

    def make(self, host: Host) -> Hook | None:
        """The hook, or `None` if it has nothing to do; raises [`NotRecognised`]."""
        ...
