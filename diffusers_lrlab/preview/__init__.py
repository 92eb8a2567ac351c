"""Schedules and timestep densities as tables and pictures, without a model."""
