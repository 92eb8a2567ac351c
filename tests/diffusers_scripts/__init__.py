"""Diffusers' own example scripts under the launcher, on tiny random models that are made here: nothing is downloaded."""
