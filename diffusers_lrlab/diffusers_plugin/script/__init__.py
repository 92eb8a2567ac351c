"""The text of a third-party script, read before it runs."""
