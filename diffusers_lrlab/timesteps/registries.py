"""Every sampler, weighting and form of a learning rate per timestep: importing this fills the registries."""

from __future__ import annotations

# isort: off
# The order of the tables.
from . import samplers
from . import curricula
from . import weighting
from . import adaptive_entries
from . import bands

# isort: on
from .bands import TIMESTEP_LRS
from .noise_levels import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

__all__ = [
    "LOSS_WEIGHTINGS",
    "TIMESTEP_LRS",
    "TIMESTEP_SAMPLERS",
    "adaptive_entries",
    "bands",
    "curricula",
    "samplers",
    "weighting",
]
