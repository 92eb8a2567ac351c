"""Forecasts of the memory, time and disk space of a run."""
