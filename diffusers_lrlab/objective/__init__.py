"""Noise process, target, loss and noise. Importing this package fills the registries `OBJECTIVES` and `NOISES`."""

from . import noise, processes

__all__ = ["noise", "processes"]
