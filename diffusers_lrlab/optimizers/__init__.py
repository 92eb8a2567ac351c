"""Optimizers by name, and the rules that scale their learning rates."""
