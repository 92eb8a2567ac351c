"""Schedules and timestep densities as tables and plots, without a model."""
