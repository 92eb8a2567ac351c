"""The file `lr_audit.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import atomic_file
from .expected import Comparison, steps_per_update
from .reading import AuditedOptimizer, AuditedProcess
from .report import Audit, Section

FORMAT_VERSION = 1


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
        "steps_per_update": steps_per_update(optimizer),
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
