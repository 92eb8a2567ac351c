"""Runs a program with the recorder in all its Python processes; reports, and writes `lr_audit.json`, when it has ended."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..core.environment import MissingExtra
from ..core.errors import LabError
from ..core.files import atomic_file
from ..core.values import COUNT, POSITIVE, Range
from .evidence import AuditedOptimizer, AuditedProcess, read_processes
from .report import lines_of, plot_audit
from .result import Audit, Comparison, Expectation, Section, make_audit

FORMAT_VERSION = 1

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
    audit = make_audit(command, status, read_processes(records), options.expectation)
    data, plot = options.out / "lr_audit.json", options.out / "lr_audit.png"
    with atomic_file(data) as temporary:
        temporary.write_text(json.dumps(as_json(audit), allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
    sys.stderr.write("\n".join(lines_of(audit)) + "\n")
    plot.unlink(missing_ok=True)  # of an earlier audit
    written, no_plot = str(data), ""
    if audit.sections:
        try:
            plot_audit(audit, plot)
            written = f"{plot} and {data}"
        except MissingExtra as error:
            no_plot = f" {error}"
    sys.stderr.write(f"Wrote {written}.{no_plot}\n")
    return status or int(not audit.holds)


# --- lr_audit.json ------------------------------------------------------------------------------------------------------


def as_json(audit: Audit) -> dict[str, Any]:
    """The content of `lr_audit.json`."""
    main = audit.processes[0] if audit.processes else AuditedProcess()
    return {
        "version": FORMAT_VERSION,
        "command": audit.command,
        "status": audit.status,
        "torch": main.header.get("torch"),
        "python": main.header.get("python"),
        "num_processes": len([each for each in audit.processes if each.stepped]),
        "differing_process": audit.differing_process and dict(zip(("rank", "update"), audit.differing_process, strict=True)),
        "error": (main.end or {}).get("error"),
        "engines": (main.end or {}).get("engines", []),
        "discarded_backward_passes": sum(main.discarded),
        "expected": audit.expectation and asdict(audit.expectation),
        "as_expected": None if audit.expectation is None else audit.holds,
        "optimizers": [_section_as_json(section) for section in audit.sections],
    }


def _section_as_json(section: Section) -> dict[str, Any]:
    optimizer, comparison = section.optimizer, section.comparison
    scheduler = optimizer.scheduler and {
        **{key: optimizer.scheduler[key] for key in ("name", "length", "warmup")},
        "steps_per_update": optimizer.steps_per_update,
    }
    return {
        "name": optimizer.name,
        "num_updates": optimizer.num_updates,
        "skipped_updates": optimizer.skipped,
        "scheduler": scheduler,
        "groups": _groups_as_json(optimizer, comparison),
        "backward_passes": _numbers(optimizer.column("b"), int),
        "scheduler_steps": _numbers(optimizer.column("s"), int),
        # With the digits of float32, to keep the file of a long run small.
        "gradient_norm": _numbers(optimizer.column("n"), lambda norm: float(f"{norm:.7g}")),
        "max_gradient_norm": _numbers(optimizer.column("c")),
        "findings": [asdict(finding) for finding in section.findings],
        "comparison": comparison
        and {
            "first_update": comparison.first_update,
            "largest_deviation": comparison.largest_deviation,
            "first_deviating_update": comparison.first_deviating_update,
        },
    }


def _groups_as_json(optimizer: AuditedOptimizer, comparison: Comparison | None) -> list[dict[str, Any]]:
    """Parameter groups, those with the same values at every update as one entry."""
    lr, momentum = optimizer.lr, optimizer.of_groups("m")
    return [
        {
            "indices": indices,
            "num_parameters": sum(optimizer.group_sizes[index] for index in indices),
            "dtype": optimizer.dtypes[indices[0]],
            "lr": _numbers(lr[:, indices[0]]),
            "momentum": _numbers(momentum[:, indices[0]]),
            "expected_lr": None if comparison is None else _numbers(comparison.lr[:, indices[0]]),
        }
        for indices in optimizer.equal_groups(lr, momentum)
    ]


def _numbers(values: np.ndarray, as_number: Callable[[float], float] = float) -> list[float | None] | None:
    """`None` for numbers that are not known, or for all if none is."""
    if not np.isfinite(values).any():
        return None
    return [as_number(value) if isfinite(value) else None for value in values.tolist()]
