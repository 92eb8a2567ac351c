"""The errors a user can mend: each message names the value, what is allowed and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(ValueError):
    """Something was asked for that cannot be done as asked. Scripts print it without a traceback and exit with 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint " Did you mean 'cosine'?" for a close match among `known`, an empty string without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
