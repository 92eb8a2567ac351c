"""Every schedule there is: importing this fills the registries."""

from __future__ import annotations

from . import feedback_entries, host_curves, lab_curves, momentum, torch_curves
from .schedule import MOMENTUM_SCHEDULERS, SCHEDULERS

__all__ = ["MOMENTUM_SCHEDULERS", "SCHEDULERS", "feedback_entries", "host_curves", "lab_curves", "momentum", "torch_curves"]
