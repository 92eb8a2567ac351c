"""Which noise levels are trained when, and how strongly: samplers, curricula, loss weightings, rates by noise level.

Importing this package fills its registries: the modules imported here have the entries, in the order of the tables.
"""

# isort: off
from . import samplers
from . import curricula
from . import bands
from . import weighting

__all__ = ["bands", "curricula", "samplers", "weighting"]
