"""Records of an audited program, read back as arrays, and the findings about them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.words import times


@dataclass
class AuditedOptimizer:
    """Records of an optimizer: a row for each update, a column for each parameter group."""

    number: int
    name: str = "optimizer"
    num_groups: int = 0  # now
    group_sizes: list[int] = field(default_factory=list)  # parameters of every group that ever existed
    dtypes: list[str | None] = field(default_factory=list)  # of learning rates that are tensors
    weights: str = "Parameter"  # their class
    adapts: bool = False  # multiplies the learning rate by an estimate of its own
    scheduler: dict[str, Any] | None = None  # the last one
    rows: list[dict[str, Any]] = field(default_factory=list)
    final_position: int | None = None  # of the scheduler at the end of the program
    skipped: int = 0  # updates that a gradient scaler skipped
    skipped_first: int = 0  # of these, before the first update
    loaded: list[dict[str, Any]] = field(default_factory=list)  # loads of a state: the next update, rates before and after

    @property
    def num_updates(self) -> int:
        return len(self.rows)

    def column(self, key: str) -> np.ndarray:
        """A number of each update; NaN where there is none."""
        values = [row.get(key) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values], float)

    @property
    def own_count(self) -> int | None:
        """Steps before the first update by the optimizer's own count; `None` if it counts none."""
        row = self.rows[0]
        return int(row["count"]) if "count" in row and "x" not in row else None  # which is read after the step

    @property
    def early_steps(self) -> int:
        """Steps of the scheduler before the first update, since it was made."""
        return int(self.rows[0].get("early", 0))

    @cached_property
    def positions(self) -> np.ndarray:
        """The position of the last scheduler at each update; NaN at updates before it."""
        of_last = [row.get("scheduler") == self.rows[-1].get("scheduler") for row in self.rows]
        return np.where(of_last, self.column("s"), np.nan)

    @property
    def steps_per_update(self) -> float:
        """How often the scheduler was stepped between two updates, on average; 0 without a scheduler."""
        positions = self.positions[np.isfinite(self.positions)]
        return float(positions[-1] - positions[0]) / (len(positions) - 1) if len(positions) > 1 else 0.0

    @cached_property
    def exists(self) -> np.ndarray:
        """`(updates, groups)`: whether the optimizer had a parameter group."""
        found = np.zeros((self.num_updates, len(self.group_sizes)), bool)
        for row, record in zip(found, self.rows, strict=True):
            row[: record["groups"]] = True
        return found

    def of_groups(self, key: str) -> np.ndarray:
        """`(updates, groups)`: a value of each parameter group at each update, NaN where there is none."""
        values = np.full((self.num_updates, len(self.group_sizes)), np.nan)
        for row, record in zip(values, self.rows, strict=True):
            given = record.get(key)
            if isinstance(given, str):
                given = np.frombuffer(bytes.fromhex(given))
            if given is not None:
                row[: record["groups"]] = np.array(given, float)
        return values

    def equal_groups(self, *values: np.ndarray) -> list[list[int]]:
        """Indices of groups, those with the same values at every update together."""
        equal: dict[bytes, list[int]] = {}
        for index in range(len(self.group_sizes)):
            equal.setdefault(b"".join(each[:, index].tobytes() for each in values), []).append(index)
        return list(equal.values())

    @cached_property  # rows of a long run take a second to read
    def lr(self) -> np.ndarray:
        return self.of_groups("lr")

    @cached_property
    def lead(self) -> np.ndarray:
        """
        The learning rate at each update of the group that has one for the most updates, the first of these. Where it does
        not exist, that of another group.
        """
        lead = np.full(self.num_updates, np.nan)
        for column in sorted(self.lr.T, key=lambda each: (np.nanmax(each, initial=0.0) <= 0, -np.isfinite(each).sum())):
            lead = np.where(np.isfinite(lead), lead, column)
        return lead


@dataclass
class AuditedProcess:
    """Records of one process of the program."""

    rank: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[int, AuditedOptimizer] = field(default_factory=dict)
    discarded: list[int] = field(default_factory=list)  # backward passes of gradients that no optimizer used
    end: dict[str, Any] | None = None  # `None` if the process was killed

    @property
    def stepped(self) -> list[AuditedOptimizer]:
        return [each for each in self.optimizers.values() if each.rows]


@dataclass(frozen=True)
class Finding:
    """A diagnosis that applies: a problem, or a note on something that may be intended."""

    name: str = field(default="", kw_only=True)  # of the diagnosis
    text: str  # cause and remedy
    is_problem: bool = True


@dataclass(frozen=True)
class Evidence:
    """An optimizer, its process, and whether the program ended by itself."""

    process: AuditedProcess
    optimizer: AuditedOptimizer
    is_complete: bool

    @property
    def lr(self) -> np.ndarray:
        return self.optimizer.lead

    @cached_property
    def peak(self) -> float:
        return float(np.nanmax(self.lr, initial=0.0))

    @property
    def start(self) -> float:
        """The first learning rate relative to the highest one."""
        return float(self.lr[0] / self.peak) if self.peak else 0.0

    @property
    def end(self) -> float:
        """The last learning rate relative to the highest one."""
        return float(self.lr[-1] / self.peak) if self.peak else 0.0

    @property
    def accumulated(self) -> int:
        """Backward passes in a typical update."""
        passes = self.optimizer.column("b")
        return int(np.nanmedian(passes)) if np.isfinite(passes).any() else 0

    @property
    def steps(self) -> float:
        """Scheduler steps per update."""
        return self.optimizer.steps_per_update

    @property
    def length(self) -> float | None:
        """Steps that the scheduler was made for."""
        return (self.optimizer.scheduler or {}).get("length") or None

    @property
    def taken(self) -> float:
        """Scheduler steps until the run's end, with those before a resume."""
        if self.optimizer.final_position is not None:
            return float(self.optimizer.final_position)
        position = self.optimizer.positions[-1]
        return float(position + self.steps) if np.isfinite(position) else 0.0


def stepped_per(seen: Evidence) -> str:
    if seen.steps >= 1 or not seen.steps:
        return f"{times(round(seen.steps))} per update"
    num_steps = seen.steps * (seen.optimizer.num_updates - 1)
    return f"once in {seen.optimizer.num_updates / (num_steps + 1):.3g} updates"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


# --- reading ------------------------------------------------------------------------------------------------------------


def read_processes(folder: Path) -> list[AuditedProcess]:
    """The processes that recorded something, the main process of the training first."""
    processes = [_read_process(path) for path in sorted(folder.glob("*.jsonl"))]
    # A launcher imports torch, too, and has rank 0.
    return sorted(
        processes, key=lambda each: (not each.stepped, not each.optimizers, each.rank, each.header.get("started", 0.0))
    )


def _read_process(path: Path) -> AuditedProcess:
    process = AuditedProcess()
    for line in path.read_bytes().split(b"\n")[:-1]:  # a killed process may not have finished the last one
        _take(process, json.loads(line))
    for optimizer in process.optimizers.values():
        # A weight may be changed before the first step. Where hooks see steps, they see all of them.
        optimizer.rows = [row for row in optimizer.rows if "x" not in row] or optimizer.rows
    return process


def _take(process: AuditedProcess, record: dict[str, Any]) -> None:
    def optimizer(number: int) -> AuditedOptimizer:
        return process.optimizers.setdefault(number, AuditedOptimizer(number))

    if "o" in record:
        found = optimizer(record["o"])
        scheduler = found.scheduler and found.scheduler["number"]
        found.rows.append({**record, "groups": found.num_groups, "scheduler": scheduler})
    elif "made" in record:
        optimizer(record["made"]).name = record["name"]
    elif "optimizer" in record:
        found = optimizer(record["optimizer"])
        found.name, found.weights, found.num_groups = record["name"], record["weights"], len(record["groups"])
        found.adapts, found.scheduler = record["adapts"], record["scheduler"]
        found.group_sizes = record["groups"] + found.group_sizes[found.num_groups :]
        found.dtypes = record["dtypes"] + found.dtypes[found.num_groups :]
    elif "header" in record:
        process.header, process.rank = record["header"], record["header"]["rank"]
    elif "skipped" in record:
        found = optimizer(record["skipped"])
        found.skipped += 1
        found.skipped_first += not found.rows
    elif "discarded" in record:
        process.discarded.append(record["b"])
    elif "loaded" in record:
        found = optimizer(record["loaded"])
        found.loaded.append({"update": found.num_updates, "before": record["before"], "after": record["after"]})
    elif "end" in record:
        process.end = record["end"]
        for number, position in record["end"].get("positions", {}).items():
            optimizer(int(number)).final_position = position
