"""Averages of the weights: those chosen by name, and the one that a schedule-free optimizer keeps."""
