"""Checks before training: each a function of a [`Subject`] with one message, or none."""
