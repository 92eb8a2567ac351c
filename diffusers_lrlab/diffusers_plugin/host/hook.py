"""What the launcher's hooks have in common: what they are made from, what they do, and which of them have a state."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from ..script.source import HostScript
from .run import HostRun


class Hook(Protocol):
    """
    What a row makes.

    Its file has two functions beside it. `recognise(script)` reads the script's text and says in words what the hook acts
    on; it raises [`NotRecognised`] with the reason if there is nothing. `make(host)` makes the hook, or raises the same.
    """

    @property
    def num_seen(self) -> int:
        """How often it had something to act on; 0 is an error with `--strict`."""
        ...

    def install(self) -> None:
        """Before the script's first line: what it replaces, it replaces by `run.patches`, which puts it back."""
        ...

    def report(self) -> str:
        """Lines for the end of the run; empty if there is nothing to say."""
        ...


@runtime_checkable
class StatefulHook(Hook, Protocol):
    """A hook with a state, which `--exact_resume` saves in checkpoints as plain data."""

    def state_dict(self, is_at_end: bool) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RangeTest(Protocol):
    """What decides on rates: [`finder.script_test`]."""

    @property
    def most_updates(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def is_read_next(self) -> bool: ...
    def begin(self, optimizer: Optimizer) -> None: ...
    def start(self, loss: float) -> None: ...
    def add(self, loss: float | None) -> bool: ...
    def fail(self) -> None: ...


@dataclass
class Host:
    """
    What hooks are made from.

    Attributes:
        script: What is read to recognise where hooks act.
        run: What hooks into the loop.
        options: Those of the launcher; in a range test, without those that do not act there.
        range_test: What decides on rates, in a range test.
        hooks: Those of earlier rows, by name; later ones follow.
        asked: The given options that the hook is made for, in words.
    """

    script: HostScript
    run: HostRun
    options: argparse.Namespace
    range_test: RangeTest | None = None
    hooks: dict[str, Hook] = field(default_factory=dict)
    asked: str = ""
