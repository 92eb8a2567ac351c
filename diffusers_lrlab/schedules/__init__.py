"""Learning-rate and momentum schedules: pure functions of the clock, and schedules that follow a metric.

Importing this room fills its registries; what is imported here are the modules with entries, in the order of the tables.
"""

# isort: off
from . import host_curves
from . import torch_curves
from . import feedback_entries
from . import lab_curves
from . import join
from . import momentum

__all__ = ["feedback_entries", "host_curves", "join", "lab_curves", "momentum", "torch_curves"]
