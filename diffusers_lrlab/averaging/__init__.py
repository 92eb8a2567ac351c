"""Averages of the weights: by name, and what a schedule-free optimizer makes by itself."""
