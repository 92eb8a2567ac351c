"""Result of an audit, and its report of at most ten lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import LabError
from ..core.words import counted
from .curve import describe_curve
from .diagnoses import diagnose
from .evidence import Evidence, Finding
from .expected import Comparison, Expectation, compare
from .reading import AuditedOptimizer, AuditedProcess

_MAX_LINES = 9  # and one that names the files
_MAX_OPTIMIZERS = 3  # in the text


@dataclass(frozen=True)
class Section:
    """The result for one optimizer."""

    optimizer: AuditedOptimizer
    evidence: Evidence
    findings: list[Finding]
    comparison: Comparison | None
    not_compared: str | None = None  # why the expectation cannot be: a warm-up longer than a run that ended early, say


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
    def num_others(self) -> int:
        """Processes that trained separately from the main process."""
        return sum(each.rank == self.processes[0].rank and bool(each.stepped) for each in self.processes[1:])

    @property
    def holds(self) -> bool:
        """Whether the expectation was met, which needs updates to compare."""
        comparisons = [section.comparison for section in self.sections]
        return self.expectation is None or bool(comparisons) and all(each is not None and each.holds for each in comparisons)


def make_audit(command: list[str], status: int, processes: list[AuditedProcess], expectation: Expectation | None) -> Audit:
    """Diagnoses the main process, and compares it with the expectation and with the other processes."""
    sections = []
    main = processes[0] if processes else AuditedProcess()
    is_complete = status == 0 and main.end is not None and main.end["error"] is None
    for optimizer in main.stepped:
        evidence = Evidence(main, optimizer, is_complete)
        comparison = not_compared = None
        try:
            comparison = None if expectation is None else compare(optimizer, expectation)
        except LabError as error:  # known only now, since it depends on the updates that ran
            not_compared = str(error)
        except Exception as error:
            not_compared = f"{type(error).__name__}: {error}"
        sections.append(Section(optimizer, evidence, diagnose(evidence), comparison, not_compared))
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


def lines_of(audit: Audit) -> list[str]:
    """The report as at most nine lines."""
    if not audit.sections:
        failed = [f"The program ended with status {audit.status}."] if audit.status else []
        return [f"LR audit: {_why_nothing(audit)}", *failed]
    lines: list[str] = []
    shown = audit.sections[:_MAX_OPTIMIZERS]
    for section in shown:
        lines += _facts(section)
        if section.comparison is not None and audit.expectation is not None:
            lines.append(_verdict(section.comparison, audit.expectation))
        elif section.not_compared is not None and audit.expectation is not None:
            lines.append(f"Expected {audit.expectation.spec}: cannot be compared. {section.not_compared}")
    if others := audit.sections[len(shown) :]:
        lines.append(f"{counted(len(others), 'more optimizer')} in lr_audit.json.")
    if audit.status:
        lines.append(f"The program ended with status {audit.status}; this is the audit of what ran.")
    if audit.differing_process is not None:
        rank, update = audit.differing_process
        lines.append(
            f"Problem: process {rank} had a different learning rate from the main process, first at update {update:,}."
        )
    if audit.num_others:
        more = counted(audit.num_others, "other process")
        lines.append(f"This is the first program of the command that trained; {more} also trained. Audit each separately.")
    findings = [
        (finding, section) for section in shown for finding in section.findings if not _is_repeated(finding, section, shown)
    ]
    findings.sort(key=lambda pair: not pair[0].is_problem)
    room = _MAX_LINES - len(lines)
    if len(findings) > room:
        room -= 1
    for finding, section in findings[:room]:
        name = f" ({_title(section.optimizer, shown)})" if len(shown) > 1 else ""
        lines.append(f"{'Problem' if finding.is_problem else 'Note'}{name}: {finding.text}")
    if hidden := len(findings) - max(room, 0):
        if hidden > 0:
            lines.append(f"{counted(hidden, 'more finding')} in lr_audit.json.")
    return lines


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
    if partial := int((~optimizer.exists.all(axis=0)).sum()):
        groups += f" ({partial} of them for a part of the run)"
    first = (
        f"LR audit: {optimizer.name} ({scheduler}), {counted(optimizer.num_updates, 'update', ',')}{accumulated}{groups}."
    )
    lr = seen.lr
    if not np.isfinite(lr).any():
        return [first, "Its learning rate could not be read."]
    if np.ptp(lr[np.isfinite(lr)]) == 0:
        where = "at every update" if np.isfinite(lr).all() else "wherever it is finite"
        return [first, f"Learning rate: {np.nanmin(lr):.4g} {where}."]
    return [first, f"Learning rate: {describe_curve(lr)}."]


def _verdict(comparison: Comparison, expectation: Expectation) -> str:
    if comparison.holds:
        return f"Expected {expectation.spec}: every update was as expected."
    size = f", by up to {comparison.largest_deviation:.3g} of the peak" if comparison.largest_deviation else ""
    text = f"Expected {expectation.spec}: NOT as expected from update {comparison.first_deviating_update:,} on{size}."
    if not comparison.largest_deviation:
        text += " There were more updates than --num_updates."
    return text


def _why_nothing(audit: Audit) -> str:
    """Explains why no update of a torch optimizer was recorded."""
    if not audit.processes:
        return (
            "nothing was recorded: the command started no Python process that imports torch, or started it with -E or -I, "
            "which ignore PYTHONPATH."
        )
    main = audit.processes[0]
    engines = ", ".join((main.end or {}).get("engines", []))
    about = f" An engine of {engines} was made, whose own steps are not seen." if engines else ""
    num_backward = (main.end or {}).get("backward", 0)
    if not main.optimizers:
        if num_backward:
            return (
                f"{counted(num_backward, 'backward pass', ',')} and no torch optimizer. An optimizer that is not a "
                f"torch.optim.Optimizer cannot be audited.{about}"
            )
        return f"the program made no torch optimizer and had no backward pass.{about}"
    names = ", ".join(each.name for each in main.optimizers.values())
    if num_backward:
        passes = counted(num_backward, "backward pass", ",")
        return f"{names} never took a step, although there {'was' if num_backward == 1 else 'were'} {passes}.{about}"
    return f"{names} was made, but never took a step, and there was no backward pass.{about}"
