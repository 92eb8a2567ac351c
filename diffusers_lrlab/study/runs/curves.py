"""Curves of a run: training losses, learning rates, and quality at the evaluation points."""

import math
from typing import Any

import numpy as np

_MOST_POINTS = 200


class Curves:
    """Rows of the log of a run, as columns; losses are averaged to at most `_MOST_POINTS` points."""

    def __init__(self, num_updates: int):
        self.num_updates = num_updates
        self._losses: list[tuple[int, float, float, float | None]] = []
        self._quality: list[dict[str, float]] = []

    def add_loss(self, update: int, loss: float, lr: float, beta1: float | None = None) -> None:
        """Adds the mean training loss since the last row, and learning rate and momentum of its last `update`."""
        self._losses.append((update, loss, lr, beta1))

    def add_quality(self, update: int, losses: dict[str, float]) -> None:
        self._quality.append({"update": update, **losses})

    @property
    def last_quality(self) -> dict[str, float]:
        return {key: value for key, value in (self._quality or [{}])[-1].items() if key != "update"}

    def to_dict(self) -> dict[str, dict[str, list[Any]]]:
        """
        Data for the record: losses as means over equal parts of the run, and quality at some points; at most 200 points.
        """
        parts: dict[int, list[tuple[int, float, float, float | None]]] = {}
        for row in self._losses:
            parts.setdefault(row[0] * _MOST_POINTS // max(self.num_updates, 1), []).append(row)
        losses = [(rows[-1][0], float(np.mean([row[1] for row in rows])), *rows[-1][2:]) for rows in parts.values()]
        finite = [row for row in losses if math.isfinite(row[1])]
        has_momentum = bool(finite) and all(row[3] is not None for row in finite)
        columns = ("update", "loss", "lr", "beta1") if has_momentum else ("update", "loss", "lr")
        loss = {name: [row[index] for row in finite] for index, name in enumerate(columns)}
        if not self._quality:
            return {"loss": loss, "quality": {}}
        # Some schedules validate after every update.
        kept = np.unique(np.linspace(0, len(self._quality) - 1, _MOST_POINTS).astype(int))
        quality = {name: [self._quality[index][name] for index in kept] for name in self._quality[0]}
        return {"loss": loss, "quality": quality}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [list(row) for row in self._losses], "quality": self._quality}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = [tuple(row) for row in state["losses"]]
        self._quality = list(state["quality"])
