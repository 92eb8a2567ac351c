"""A third-party script while it runs: what it prepares, and how to observe and restore it."""
