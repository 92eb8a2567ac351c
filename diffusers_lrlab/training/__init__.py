"""Configuration, plan, loop and record of a training run."""
