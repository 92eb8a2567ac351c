"""Errors that users can fix, and the exit status of programs.

Each message names the value, what is allowed and the remedy.
"""

import difflib
import math
import os
import re
import reprlib
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

# Control characters other than line ends and tabs, and those that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


_continuing: list[str] = []  # of the commands that run, the outermost first


@contextmanager
def continued_by(text: str) -> Iterator[None]:
    """Errors of this block say that `text` continues the work, unless the command around it continues in another way."""
    _continuing.append(text)
    try:
        yield
    finally:
        _continuing.pop()


def how_to_continue() -> str:
    """What continues the work of the running command once it has ended early, for the remedies of errors."""
    return _continuing[0] if _continuing else "give the same command again"


class LabError(ValueError):
    """An error that the user can fix. Programs print it without a traceback and exit with 2."""


class DiskFull(LabError):
    """The file at `path` could not be written, for the `reason` that the system gave. No part of it is left there."""

    def __init__(self, path: Path, reason: str, is_full: bool = True):
        what, remedy = ("No room to write", "Free some space") if is_full else ("Cannot write", "Make the folder writable")
        left = f"{what} {str(path)!r} ({reason}). No partial file was left there."
        super().__init__(f"{left} {remedy}, then {how_to_continue()}.")


class Diverged(LabError):
    """The error for a run whose loss or weights are no longer finite."""


class Interrupted(BaseException):
    """
    A run was stopped by a signal (2 for Ctrl-C, 15 for SIGTERM) and saved a checkpoint to resume from.

    Like a `KeyboardInterrupt`, it is no `Exception`, so libraries that catch those, while they import say, let it pass.
    """

    def __init__(self, signal_number: int, checkpoint: Path):
        super().__init__(
            f"Stopped by {signal.Signals(signal_number).name} after a whole update. To go on, {how_to_continue()} "
            f"({checkpoint})."
        )
        self.signal_number, self.checkpoint = signal_number, checkpoint


_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|[Uu]nable to allocate|out of memory")
_NO_SHARED_MEMORY = re.compile(r"shared memory|</torch_\d")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch ran out of memory, on the host or on a device."""
    return isinstance(error, MemoryError) or bool(isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)))


@contextmanager
def system_errors_explained() -> Iterator[None]:
    """Explains torch's errors for killed worker processes, which it may raise anywhere, and for lack of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text, last = (str(error).strip().split("\n")[index] for index in (0, -1))  # `last` is the worker's own error
        of_worker, is_raised = "DataLoader worker" in text, text.startswith("Caught")  # else it has ended
        if of_worker and (not is_raised or _NO_MEMORY.search(last) or _NO_SHARED_MEMORY.search(last)):
            what = f"failed ({last})" if is_raised else f"has died ({text.rstrip('. ')})"
            raise LabError(
                f"A process that decodes images {what}, probably because memory, or shared memory (/dev/shm), was full. "
                "Use fewer --dataloader_num_workers (0 needs no shared memory) or a lower --in_memory_limit_mb, then "
                f"{how_to_continue()}."
            ) from error
        if is_out_of_memory(error):
            raise LabError(
                f"There is not enough memory ({text or 'MemoryError'}). Lower --train_batch_size, --resolution, "
                "--eval_batch_size or --num_validation_images; --dry_run shows what a run needs."
            ) from error
        raise


class _Repr(reprlib.Repr):
    """Cuts long values, shows NumPy's floats as numbers, and does not raise for integers that Python refuses to print."""

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() <= 200:
            return str(value)
        return f"(a number of about {round(value.bit_length() * math.log10(2))} digits)"

    def repr_float64(self, value: Any, level: int) -> str:
        return str(value)  # and not np.float64(0.5)


_repr = _Repr()
_repr.maxlevel, _repr.maxtuple, _repr.maxlist, _repr.maxset, _repr.maxdict = 3, 20, 20, 20, 10
_repr.maxstring = _repr.maxother = 100
shown = _repr.repr
"""A value as an error message shows it."""


_as_arguments = ContextVar("as_arguments", default=False)


@contextmanager
def arguments_named() -> Iterator[None]:
    """Errors of this block name options as arguments: `seed=-1` in place of `--seed -1`."""
    token = _as_arguments.set(True)
    try:
        yield
    finally:
        _as_arguments.reset(token)


def given(name: str, value: Any) -> str:
    """A flag, with its dashes, or an argument or a key, with its value, as the caller gave it."""
    if _as_arguments.get():
        name = name.removeprefix("--")
    return f"{name}={shown(value)}" if name.isidentifier() else f"{name} {shown(value)}"


def must_be(name: str, value: Any, wanted: str, hint: str, of: str = "", got: str = "") -> LabError:
    """
    The error for a value that is not allowed, in the form that all of them have.

    `name` is a flag with its dashes, an argument `of` something, or a key of a file; `hint` is the remedy, or the meaning of
    the value; `got` is the value in words, if `value` alone does not show what is wrong.
    """
    end = "" if hint[-1:] in ".?" else "."
    owner = f" of {of}" if of else ""
    return LabError(f"{given(name, value)}{owner}: must be {wanted}, got {got or shown(value)}. Hint: {hint}{end}")


def cut(message: str) -> str:
    """A message that may repeat something long."""
    return message if len(message) <= 1000 else f"{message[:300]} ... {message[-100:]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint " Did you mean 'cosine'?" if one of `known` is close, else an empty string."""
    spelt = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(spelt), n=1, cutoff=0.65)
    return f" Did you mean {spelt[close[0]]!r}?" if close else ""


def printable(text: str) -> str:
    """Text that is safe to print: control characters, which records and the Hub may contain, are escaped."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def is_first_process() -> bool:
    """Whether this process has rank 0, and so prints and writes for all of them."""
    return int(os.environ.get("RANK", 0)) == 0


def warn(message: str) -> None:
    """Prints a warning, from the first process only."""
    if is_first_process():
        sys.stderr.write(f"warning: {printable(message)}\n")
