"""Values read from a program, and the file of records: one line of JSON each, kept even if the process is killed."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from typing import Any

import torch

_ENCODE = json.JSONEncoder(default=lambda value: value.tolist(), separators=(",", ":")).encode
_FLUSH_AFTER = 1.0  # seconds that a value on a device may wait to be read
_PASSED_THROUGH = ("ToCopy", "Alias", "View", "Squeeze", "Reshape", "Clone")


class RecordFile:
    """Records of this process. A forked process gets a file of its own."""

    def __init__(self, folder: str):
        self._folder = folder
        self._file: int | None = None  # `None` if it cannot be written
        self._process = -1
        self._waiting: list[dict[str, Any]] = []
        self._last_flush = 0.0

    def write(self, record: dict[str, Any]) -> None:
        """
        Writes a record, in which a tensor stands for its value.

        Tensors on a device are read about once a second: reading each at once would make the host wait for the device.
        """
        if not self.is_used:
            self._open()
        waits = any(isinstance(value, torch.Tensor) for value in record.values())
        if not waits and not self._waiting:
            self._write_line(record)
            return
        if not self._waiting:
            self._last_flush = time.monotonic()
        self._waiting.append(record)
        if time.monotonic() - self._last_flush > _FLUSH_AFTER:
            self.flush()

    @property
    def is_used(self) -> bool:
        """Whether this process has written anything."""
        return self._process == os.getpid()

    def flush(self) -> None:
        if not self.is_used:
            return
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._write_line(record)

    def _write_line(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = f"{_ENCODE(record)}\n".encode()
        try:
            is_written = os.write(self._file, line) == len(line)
        except OSError:
            is_written = False
        if not is_written:  # no room on the disk: the records end here
            self._file = None

    def _open(self) -> None:
        self._process, self._waiting = os.getpid(), []
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        path = os.path.join(self._folder, f"{rank}-{self._process}.jsonl")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError:
            self._file = None
        header = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "program": sys.argv,
            "started": time.time(),
        }
        self._write_line({"header": {**header, "rank": int(rank) if rank.isdecimal() else 0, "process": self._process}})


def readable(value: Any) -> Any:
    """
    A number, or a copy of a tensor on a device, to be read later; `None` for anything else.

    A distributed tensor is not read: that may be a collective call, for which other processes would have to wait.
    """
    if value is None or isinstance(value, (int, float)):
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() != 1:
        return None
    if value.device.type == "cpu":
        return value.item()
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return value.detach().reshape(()).clone() if value.device.type != "meta" else None


def loss_divisor(tensors: Any, is_scaled: bool) -> float | None:
    """
    The product of the divisors at the end of the loss's graph; 1 if there is none, `None` if it is unknown.

    `is_scaled` leaves out one factor, the scale of a gradient scaler.
    """
    root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
    node = getattr(root, "grad_fn", None)
    if node is None:
        return None
    divisor = 1.0
    for _ in range(8):
        name = node.name()
        if name.startswith(("DivBackward", "MulBackward")):
            factor = _constant(node)
            if name.startswith("Mul") and is_scaled:
                is_scaled, factor = False, 1.0
            if factor is None:
                return None
            divisor *= factor if name.startswith("Div") else 1 / (factor or 1.0)
        elif not name.startswith(_PASSED_THROUGH):
            break
        node = node.next_functions[0][0]
        if node is None:
            break
    return divisor


def _constant(node: Any) -> float | None:
    """The number by which a node divides or multiplies."""
    if len(node.next_functions) > 1 and node.next_functions[1][0] is not None:
        return None
    value = getattr(node, "_saved_other", None)
    if type(value) is torch.Tensor and value.numel() == 1 and value.device.type == "cpu":
        return float(value)
    return None
