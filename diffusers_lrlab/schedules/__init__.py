"""Learning-rate and momentum schedules: pure functions of the clock, and schedules that follow a metric.

Importing this package fills its registries: the modules imported here have the entries, in the order of the tables. Its
other attributes are functions that return schedules as values, such as `rex`.
"""

import importlib
import pkgutil
from typing import Any

# isort: off
from . import host_curves
from . import torch_curves
from . import feedback_entries
from . import lab_curves
from . import joined
from . import momentum

__all__ = ["feedback_entries", "host_curves", "joined", "lab_curves", "momentum", "torch_curves"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name in {module.name for module in pkgutil.iter_modules(__path__)}:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}"
        )  # so that the import system looks for a module
    return importlib.import_module(".values", __name__).maker(name)
