"""Data sets: embedded, local and from the Hub, as batches in [-1, 1]."""
