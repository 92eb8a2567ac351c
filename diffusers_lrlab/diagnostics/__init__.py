"""Diagnostics of a run: losses and gradients by noise level, and warnings about the learning rate."""
