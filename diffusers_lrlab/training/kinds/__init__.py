"""Kinds of data: images, points."""
