"""The result of an audit: its diagnoses, its comparisons and the file `lr_audit.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError
from ..core.files import atomic_file
from . import of_schedules, of_updates
from .evidence import AuditedOptimizer, AuditedProcess, Evidence, Finding
from .expected import Comparison, Expectation, compare

FORMAT_VERSION = 1
# A diagnosis looks at the evidence and returns a finding or `None`. A new one is a row here.
DIAGNOSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    of_schedules.not_finite,
    of_updates.schedule_not_resumed,
    of_schedules.too_long,
    of_schedules.rose_after_end,
    of_schedules.too_short,
    of_schedules.still_warming_up,
    of_schedules.over_early,
    of_updates.ahead_of_updates,
    of_updates.high_at_first,
    of_schedules.never_scheduled,
    of_updates.discarded,
    of_schedules.rounded,
    of_updates.jumped,
    of_schedules.high_at_end,
    of_schedules.warmup_scaled,
    of_updates.summed,
    of_updates.clipped_early,
    of_schedules.rarely_stepped,
    of_updates.overflowed,
    of_updates.clipped,
    of_updates.unused,
    of_schedules.own_estimate,
    of_schedules.unseen_steps,
    of_schedules.engine_hides,
)


_OF_LENGTH = ("too_long", "rose_after_end", "too_short", "still_warming_up", "over_early", "high_at_end")


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


# --- diagnoses ----------------------------------------------------------------------------------------------------------


def diagnose(seen: Evidence) -> list[Finding]:
    """All findings about an optimizer, problems first."""
    found = [finding for diagnosis in DIAGNOSES if (finding := _guarded(diagnosis, seen)) is not None]
    if any(finding.name == "schedule_not_resumed" for finding in found):  # another length would be the wrong remedy
        found = [finding for finding in found if finding.name not in _OF_LENGTH]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _guarded(diagnosis: Callable[[Evidence], Finding | None], seen: Evidence) -> Finding | None:
    """One diagnosis that fails costs a line, not the audit of a run."""
    name = diagnosis.__name__
    try:
        finding = diagnosis(seen)
    except Exception as error:
        finding = Finding(f"The diagnosis `{name}` failed: {type(error).__name__}: {error}.", is_problem=False)
    return finding and replace(finding, name=name)


# --- file ---------------------------------------------------------------------------------------------------------------


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
        "gradient_norm": _numbers(optimizer.column("n"), _seven_digits),
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


def _seven_digits(value: float) -> float:
    """Those of float32, to keep the file of a long run small."""
    return float(f"{value:.7g}")


def write_json(audit: Audit, path: Path) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(as_json(audit), allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
