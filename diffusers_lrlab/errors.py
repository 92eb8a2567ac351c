"""The errors a user can mend: each message names the value, what is allowed and the remedy."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from pathlib import Path


class LabError(ValueError):
    """Something was asked for that cannot be done as asked. Scripts print it without a traceback and exit with 2."""


class Diverged(LabError):
    """A run whose loss is no longer finite."""


class Interrupted(Exception):
    """
    A run that was asked to stop and has saved itself.

    Args:
        signal_number (`int`): 2 for Ctrl-C, 15 for SIGTERM; a script leaves with 128 + this.
        checkpoint (`Path`): Where to go on from.
    """

    def __init__(self, signal_number: int, checkpoint: Path):
        super().__init__(
            f"Stopped by {signal.Signals(signal_number).name} after a whole update. To go on, give the same command "
            f"again with --resume_from_checkpoint latest ({checkpoint})."
        )
        self.signal_number, self.checkpoint = signal_number, checkpoint


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint " Did you mean 'cosine'?" for a close match among `known`, an empty string without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
