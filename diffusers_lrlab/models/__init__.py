"""Denoisers, and their configurations."""
