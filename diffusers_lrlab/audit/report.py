"""Report of an audit: at most ten lines of text, and `lr_audit.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import atomic_file
from ..core.words import counted
from .diagnoses import Evidence, Finding, diagnose
from .expected import Comparison, Expectation, compare, steps_per_update
from .reading import AuditedOptimizer, AuditedProcess

FORMAT_VERSION = 1
_MAX_LINES = 10
_MAX_OPTIMIZERS = 3  # in the text


@dataclass(frozen=True)
class Section:
    """The result for one optimizer."""

    optimizer: AuditedOptimizer
    evidence: Evidence
    findings: list[Finding]
    comparison: Comparison | None


@dataclass(frozen=True)
class Audit:
    """The result for a program."""

    command: list[str]
    status: int  # of the program
    processes: list[AuditedProcess]  # the main one first
    sections: list[Section]
    expectation: Expectation | None
    differing_process: tuple[int, int] | None  # rank, and the first update whose rates are not those of the main process

    @property
    def deviates(self) -> bool:
        return any(each.comparison is not None and not each.comparison.holds for each in self.sections)

    @property
    def holds(self) -> bool:
        """Whether the expectation was met, which needs updates to compare."""
        return self.expectation is None or bool(self.sections) and not self.deviates


def make_audit(
    command: list[str], status: int, processes: list[AuditedProcess], expectation: Expectation | None
) -> Audit:
    """Diagnoses the main process, compares it with the expectation and the other processes with it."""
    sections = []
    main = processes[0] if processes else AuditedProcess()
    is_complete = status == 0 and main.end is not None and main.end["error"] is None
    for optimizer in main.stepped:
        evidence = Evidence(main, optimizer, is_complete)
        comparison = None if expectation is None else compare(optimizer, expectation)
        sections.append(Section(optimizer, evidence, diagnose(evidence), comparison))
    return Audit(command, status, processes, sections, expectation, _differing(processes))


def _differing(processes: list[AuditedProcess]) -> tuple[int, int] | None:
    for other in processes[1:]:
        for number, optimizer in processes[0].optimizers.items():
            theirs = other.optimizers.get(number)
            if theirs is None or not theirs.rows or other.rank == processes[0].rank:
                continue
            common = min(len(optimizer.rows), len(theirs.rows))
            ours, others = optimizer.lead[:common], theirs.lead[:common]
            if wrong := np.flatnonzero(~np.isclose(ours, others, rtol=1e-9, atol=0, equal_nan=True)).tolist():
                return other.rank, wrong[0]
    return None


# --- text -------------------------------------------------------------------------------------------------------------


def lines_of(audit: Audit, files: str) -> list[str]:
    """The report as at most ten lines; `files` says what was written."""
    if not audit.sections:
        failed = [f"The program ended with status {audit.status}."] if audit.status else []
        return [f"LR audit: {_why_nothing(audit)}", *failed, files]
    lines: list[str] = []
    shown = audit.sections[:_MAX_OPTIMIZERS]
    for section in shown:
        lines += _facts(section)
        if section.comparison is not None and audit.expectation is not None:
            lines.append(_verdict(section.comparison, audit.expectation))
    if others := audit.sections[len(shown) :]:
        lines.append(f"{counted(len(others), 'more optimizer')} in lr_audit.json.")
    if audit.status:
        lines.append(f"The program ended with status {audit.status}; this is the audit of what ran.")
    if audit.differing_process is not None:
        rank, update = audit.differing_process
        lines.append(f"Problem: process {rank} had another learning rate than the main process, first at update {update:,}.")
    findings = [
        (finding, section) for section in shown for finding in section.findings if not _is_repeated(finding, section, shown)
    ]
    findings.sort(key=lambda pair: not pair[0].is_problem)
    room = _MAX_LINES - len(lines) - 1
    if len(findings) > room:
        room -= 1
    for finding, section in findings[:room]:
        name = f" ({_title(section.optimizer, shown)})" if len(shown) > 1 else ""
        lines.append(f"{'Problem' if finding.is_problem else 'Note'}{name}: {finding.text}")
    if hidden := len(findings) - max(room, 0):
        if hidden > 0:
            lines.append(f"{counted(hidden, 'more finding')} in lr_audit.json.")
    return [*lines, files]


def _is_repeated(finding: Finding, section: Section, shown: list[Section]) -> bool:
    """Whether an earlier optimizer has the same text."""
    earlier = shown[: shown.index(section)]
    return any(finding in each.findings for each in earlier)


def _title(optimizer: AuditedOptimizer, shown: list[Section]) -> str:
    same = [each for each in shown if each.optimizer.name == optimizer.name]
    return f"{optimizer.name} {optimizer.number}" if len(same) > 1 else optimizer.name


def _facts(section: Section) -> list[str]:
    optimizer, seen = section.optimizer, section.evidence
    scheduler = optimizer.scheduler["name"] if optimizer.scheduler else "no torch scheduler"
    accumulated = f", {counted(seen.accumulated, 'backward pass')} each" if seen.accumulated else ""
    groups = f", {counted(len(optimizer.group_sizes), 'parameter group')}" if len(optimizer.group_sizes) > 1 else ""
    first = f"LR audit: {optimizer.name} ({scheduler}), {counted(optimizer.num_updates, 'update', ',')}{accumulated}{groups}."
    lr = seen.lr
    if not np.isfinite(lr).any():
        return [first, "Its learning rate could not be read."]
    if np.ptp(lr[np.isfinite(lr)]) == 0:
        return [first, f"Learning rate: {lr[0]:.4g} at every update."]
    peak = int(np.nanargmax(lr >= seen.peak * (1 - 1e-9)))
    return [
        first,
        f"Learning rate: {lr[0]:.4g} at update 0, highest at update {peak:,} ({seen.peak:.4g}), {lr[-1]:.4g} at the last "
        f"({100 * seen.end:.3g} % of the highest).",
    ]


def _verdict(comparison: Comparison, expectation: Expectation) -> str:
    if comparison.holds:
        return f"Expected {expectation.spec}: every update was as expected."
    size = f", by up to {comparison.largest_deviation:.3g} of the peak" if comparison.largest_deviation else ""
    text = f"Expected {expectation.spec}: NOT as expected from update {comparison.first_deviating_update:,} on{size}."
    if not comparison.largest_deviation:
        text += " There were more updates than --num_updates."
    return text


def _why_nothing(audit: Audit) -> str:
    """What is known of a program without an update of a torch optimizer."""
    if not audit.processes:
        return (
            "nothing was recorded: the command started no Python process that imports torch, or started it with -E or -I, "
            "which ignore PYTHONPATH."
        )
    main = audit.processes[0]
    engines = ", ".join((main.end or {}).get("engines", []))
    about = f" Imported: {engines}." if engines else ""
    num_backward = (main.end or {}).get("backward", 0)
    if not main.optimizers:
        if num_backward:
            return (
                f"{counted(num_backward, 'backward pass', ',')} and no torch optimizer. An optimizer that is no "
                f"torch.optim.Optimizer cannot be audited.{about}"
            )
        return f"the program made no torch optimizer and had no backward pass.{about}"
    names = ", ".join(each.name for each in main.optimizers.values())
    if num_backward:
        passes = counted(num_backward, "backward pass", ",")
        return f"{names} never took a step, although there {'was' if num_backward == 1 else 'were'} {passes}.{about}"
    return f"{names} was made, but never took a step, and there was no backward pass.{about}"


# --- JSON -------------------------------------------------------------------------------------------------------------


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
    scheduler = optimizer.scheduler and {**optimizer.scheduler, "steps_per_update": steps_per_update(optimizer)}
    return {
        "name": optimizer.name,
        "num_updates": optimizer.num_updates,
        "skipped_updates": optimizer.skipped,
        "scheduler": scheduler,
        "groups": _groups_as_json(optimizer, comparison),
        "backward_passes": _numbers(optimizer.column("b")),
        "scheduler_steps": _numbers(optimizer.column("s")),
        "gradient_norm": _numbers(optimizer.column("n")),
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
    entries: dict[bytes, dict[str, Any]] = {}
    for group in range(lr.shape[1]):
        key = lr[:, group].tobytes() + momentum[:, group].tobytes()
        entry = entries.setdefault(
            key,
            {
                "indices": [],
                "num_parameters": 0,
                "dtype": optimizer.dtypes[group] if optimizer.dtypes else None,
                "lr": _numbers(lr[:, group]),
                "momentum": _numbers(momentum[:, group]),
                "expected_lr": None if comparison is None else _numbers(comparison.lr[:, group]),
            },
        )
        entry["indices"].append(group)
        entry["num_parameters"] += optimizer.group_sizes[group] if optimizer.group_sizes else 0
    return list(entries.values())


def _numbers(values: np.ndarray) -> list[float | None] | None:
    """`None` for numbers that are not known, or for all if none is."""
    if not np.isfinite(values).any():
        return None
    return [value if np.isfinite(value) else None for value in values.tolist()]


def write_json(audit: Audit, path: Path) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(as_json(audit), allow_nan=False) + "\n", encoding="utf-8")
