"""Records of an audited program, read back as arrays."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class AuditedOptimizer:
    """Records of an optimizer: a row for each update, a column for each parameter group."""

    number: int
    name: str = "optimizer"
    group_sizes: list[int] = field(default_factory=list)  # parameters
    dtypes: list[str | None] = field(default_factory=list)  # of learning rates that are tensors
    weights: str = "Parameter"  # their class
    adapts: bool = False  # multiplies the learning rate by an estimate of its own
    scheduler: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    final_position: int | None = None  # of the scheduler at the end of the program
    skipped: int = 0  # updates that a gradient scaler skipped
    loaded: list[dict[str, Any]] = field(default_factory=list)  # loads of a state: the next update, rates before and after

    @property
    def num_updates(self) -> int:
        return len(self.rows)

    def column(self, key: str) -> np.ndarray:
        """A number of each update; NaN where there is none."""
        values = [row.get(key) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values], float)

    def of_groups(self, key: str) -> np.ndarray:
        """`(updates, groups)`: a value of each parameter group at each update, NaN where there is none."""
        num_groups = max(len(self.group_sizes), 1)
        values = np.full((self.num_updates, num_groups), np.nan)
        for row, record in zip(values, self.rows, strict=True):
            given = record.get(key)
            if isinstance(given, str):
                given = np.frombuffer(bytes.fromhex(given)).tolist()
            if isinstance(given, list):
                row[: len(given)] = [np.nan if value is None else value for value in given][:num_groups]
            elif given is not None:
                row[:] = given
        return values

    @cached_property  # rows of a long run take a second to read
    def lr(self) -> np.ndarray:
        return self.of_groups("lr")

    @cached_property
    def lead(self) -> np.ndarray:
        """The learning rate of the first group that has any, at each update."""
        lr = self.lr
        columns = [column for column in lr.T if np.nanmax(column, initial=0.0) > 0]
        return columns[0] if columns else lr[:, 0]


@dataclass
class AuditedProcess:
    """Records of one process of the program."""

    rank: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[int, AuditedOptimizer] = field(default_factory=dict)
    discarded: list[int] = field(default_factory=list)  # backward passes of gradients that no optimizer used
    end: dict[str, Any] | None = None  # `None` if the process was killed

    @property
    def started(self) -> float:
        return float(self.header.get("started", 0.0))

    @property
    def stepped(self) -> list[AuditedOptimizer]:
        return [each for each in self.optimizers.values() if each.rows]


def read_processes(folder: Path) -> list[AuditedProcess]:
    """The processes that recorded something, the main process of the training first."""
    processes = [_read_process(path) for path in sorted(folder.glob("*.jsonl"))]
    # A launcher imports torch, too, and has rank 0.
    return sorted(processes, key=lambda each: (not each.stepped, not each.optimizers, each.rank, each.started))


def _read_process(path: Path) -> AuditedProcess:
    process = AuditedProcess()
    # The file is longer than what has been written, and a killed process may not have finished its last line.
    lines = path.read_bytes().rstrip(b"\0").split(b"\n")[:-1]
    for line in lines:
        _take(process, json.loads(line))
    for optimizer in process.optimizers.values():
        # A weight may be changed before the first step. Where hooks see steps, they see all of them.
        optimizer.rows = [row for row in optimizer.rows if "x" not in row] or optimizer.rows
    return process


def _take(process: AuditedProcess, record: dict[str, Any]) -> None:
    def optimizer(number: int) -> AuditedOptimizer:
        return process.optimizers.setdefault(number, AuditedOptimizer(number))

    if "o" in record:
        optimizer(record["o"]).rows.append(record)
    elif "made" in record:
        optimizer(record["made"]).name = record["name"]
    elif "optimizer" in record:
        found = optimizer(record["optimizer"])
        found.name, found.group_sizes, found.dtypes = record["name"], record["groups"], record["dtypes"]
        found.weights, found.adapts, found.scheduler = record["weights"], record["adapts"], record["scheduler"]
    elif "header" in record:
        process.header, process.rank = record["header"], record["header"]["rank"]
    elif "skipped" in record:
        optimizer(record["skipped"]).skipped += 1
    elif "discarded" in record:
        process.discarded.append(record["b"])
    elif "loaded" in record:
        found = optimizer(record["loaded"])
        found.loaded.append({"update": found.num_updates, "before": record["before"], "after": record["after"]})
    elif "end" in record:
        process.end = record["end"]
        for number, position in record["end"].get("positions", {}).items():
            optimizer(int(number)).final_position = position
