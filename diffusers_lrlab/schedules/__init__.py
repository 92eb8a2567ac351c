"""Learning-rate and momentum schedules: pure functions of the clock, and schedules that follow a metric.

Importing this package fills its registries: the modules imported here have the entries, in the order of the tables.
"""

# isort: off
from . import host_curves
from . import torch_curves
from . import lab_curves
from . import momentum

__all__ = ["host_curves", "lab_curves", "momentum", "torch_curves"]
