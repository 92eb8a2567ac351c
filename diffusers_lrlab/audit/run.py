"""Runs a program with the recorder in all its Python processes, and reports when it has ended."""

from __future__ import annotations

import ctypes
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

from ..core.errors import LabError
from ..core.extras import MissingExtra
from ..core.files import remove
from .expected import Expectation
from .json_file import write_json
from .reading import read_processes
from .report import Audit, lines_of, make_audit

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
        if self.out.exists() and not self.out.is_dir():
            raise LabError(f"--out {str(self.out)!r}: must be a folder, got a file. Hint: lr_audit.png is written into it.")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.out).close()
        except OSError as error:
            reason = f"got: {error.strerror}"
            raise LabError(f"--out {str(self.out)!r}: must be a folder that can be written to, {reason}.") from None
        if self.expectation is not None:
            self.expectation.check()


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


def run_audited_rank(command: list[str], options: AuditOptions) -> int:
    """
    Like [`run_audited`], for one process that a launcher has started (`accelerate launch -m diffusers_lrlab.audit`).

    All processes of a launcher write to one folder; the main process reports and removes it.
    """
    if os.environ.get(_RECORDS):  # the launcher itself is audited
        return _run(command, Path(os.environ[_RECORDS]))
    user = os.getuid() if hasattr(os, "getuid") else 0
    run = os.environ.get("TORCHELASTIC_RUN_ID", "").replace(os.sep, "-")
    records = Path(tempfile.gettempdir()) / f"lrlab-audit-{user}-{os.getppid()}{run and '-'}{run}"
    is_main = int(os.environ.get("RANK", 0)) == 0
    if is_main:
        options.check()
    records.mkdir(mode=0o700, exist_ok=True)
    try:
        status = _run(command, records)
        return _report(command, status, records, options) if is_main else status
    finally:
        if is_main:
            shutil.rmtree(records, ignore_errors=True)


def _run(command: list[str], records: Path) -> int:
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, _RECORDS: str(records), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if str(_STARTUP) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=_dies_with_parent())
    except FileNotFoundError:
        raise LabError(f"No such command: {command[0]!r}. Hint: `lrlab audit -- python train.py ...`.") from None
    except PermissionError:
        remedy = f"Hint: for a script, `lrlab audit -- python {command[0]} ...`."
        raise LabError(f"{command[0]!r} is not executable. {remedy}") from None
    except OSError as error:  # a shell script without its first line, say
        raise LabError(f"{command[0]!r}: {error.strerror}. Hint: for a shell script, `bash {command[0]}`.") from None
    with _signals_passed_on(process):
        status = process.wait()
    return 128 - status if status < 0 else status


def _dies_with_parent() -> Callable[[], Any] | None:
    """On Linux, ends the program if this process is killed, as a launcher may do; it would keep the device otherwise."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


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
        from .plot import plot_audit

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
