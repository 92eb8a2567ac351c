"""Runs a program with the recorder in all its Python processes, and reports when it has ended."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.environment import MissingExtra
from ..core.errors import LabError
from ..core.files import remove
from ..core.values import COUNT, POSITIVE, Range
from .evidence import read_processes
from .expected import Expectation
from .report import lines_of, plot_audit
from .result import Audit, make_audit, write_json

_STARTUP = Path(__file__).with_name("startup")
_RECORDS = "LRLAB_AUDIT"  # the folder of records, in the environment of the program
_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class AuditOptions:
    """Where to write the audit, and what to compare with."""

    out: Path = Path(".")
    expectation: Expectation | None = None

    def check(self) -> None:
        """Raises a `LabError` before the program is started."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.out).close()
        except OSError as error:
            wanted = f"must be a folder that can be written to, got: {error.strerror}"
            raise LabError(f"--out {str(self.out)!r}: {wanted}. Hint: lr_audit.png is written into it.") from None
        if self.expectation is not None:
            self.expectation.check()


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("."), metavar="DIR", help="Folder of lr_audit.png and lr_audit.json (default: .).")
    add("--expect", metavar="SPEC", help="Compare each update with this schedule; status 1 if one deviates.")
    add("--num_updates", type=int, metavar="N", help="Updates of the whole run, for --expect (default: those that ran).")
    warmup = "Warm-up for --expect, in updates, or below 1 as a fraction of the run (default: 0)."
    add("--num_warmup_steps", type=float, metavar="W", help=warmup)
    add("--learning_rate", type=float, metavar="LR", help="Peak for --expect (default: the highest that ran).")
    momentum = "Momentum of the optimizer, for a schedule that sets it (default: the highest that ran)."
    add("--beta1", type=float, metavar="X", help=momentum)
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="The program and its own arguments.")


def options_of(options: argparse.Namespace) -> AuditOptions:
    """The options, checked."""
    for name in ("num_updates", "num_warmup_steps", "learning_rate", "beta1"):
        if getattr(options, name) is not None and options.expect is None:
            raise LabError(f"--{name} has no effect without --expect. Add that or leave it out.")
    COUNT.check("--num_updates", options.num_updates, "it counts the optimizer updates of the whole run")
    Range("[0, inf)").check("--num_warmup_steps", options.num_warmup_steps, "it counts updates, or is a fraction of the run")
    POSITIVE.check("--learning_rate", options.learning_rate, "1e-4 is usual")
    Range("(0, 1)").check("--beta1", options.beta1, "0.9 is usual")
    if options.expect is None:
        return AuditOptions(options.out)
    warmup = options.num_warmup_steps or 0
    warmup = int(warmup) if float(warmup).is_integer() else warmup
    expected = Expectation(options.expect, options.num_updates, warmup, options.learning_rate, options.beta1)
    return AuditOptions(options.out, expected)


def run_audited(command: list[str], options: AuditOptions) -> int:
    """
    Runs a command and reports what its training processes did. Returns its exit status, or 1 if it deviates from the
    expectation.

    The program's environment gets two variables. Python imports `startup/sitecustomize.py` through PYTHONPATH, which every
    launcher passes on to the processes that it starts: so one mechanism serves `python`, `accelerate`, `torchrun`, shell
    scripts and spawned processes, and the program itself is run as it always is.
    """
    options.check()
    records = Path(tempfile.mkdtemp(prefix="lrlab-audit-"))
    try:
        status = _run(command, records)
        return _report(command, status, records, options)
    finally:
        shutil.rmtree(records, ignore_errors=True)


def _run(command: list[str], records: Path) -> int:
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, _RECORDS: str(records), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        hint = f"for a script, `lrlab audit -- python {command[0]} ...` or `lrlab audit -- bash {command[0]} ...`"
        raise LabError(f"{command[0]!r} cannot be started: {error.strerror}. Hint: {hint}.") from None
    with _signals_passed_on(process):
        status = process.wait()
    return 128 - status if status < 0 else status


@contextmanager
def _signals_passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves Ctrl-C, which the terminal sends to both, to the program, and passes other signals on to it."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    for name in _FORWARDED:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # which nohup sets
            before[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(command: list[str], status: int, records: Path, options: AuditOptions) -> int:
    """Writes the file, prints the report and draws the plot, in this order: each without the others if they fail."""
    audit = make_audit(command, status, read_processes(records), options.expectation)
    data, plot = options.out / "lr_audit.json", options.out / "lr_audit.png"
    failures = [_failure(data.name, lambda: write_json(audit, data))]
    failures.append(_failure("The report", lambda: sys.stderr.write("\n".join(lines_of(audit)) + "\n")))
    no_plot = _failure(plot.name, lambda: _plot(audit, plot))
    files = [
        str(path) for path, is_written in ((plot, audit.sections and not no_plot), (data, not failures[0])) if is_written
    ]
    written = [f"Wrote {' and '.join(files)}."] if files else []
    sys.stderr.write(" ".join([*written, *filter(None, [*failures, no_plot])]) + "\n")
    return status or int(not audit.holds or any(failures))


def _plot(audit: Audit, path: Path) -> None:
    if path.exists():
        remove(path)  # of an earlier audit
    if audit.sections:
        plot_audit(audit, path)


def _failure(name: str, part: Callable[[], Any]) -> str | None:
    """Does a part of an audit, and says why it failed, if it did."""
    try:
        part()
        return None
    except MissingExtra as error:
        return str(error)
    except Exception as error:
        return f"{name} could not be written: {type(error).__name__}: {error}."
