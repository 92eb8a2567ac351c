"""Pipelines that diffusers lacks."""
