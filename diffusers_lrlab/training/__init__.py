"""Configuration, plan, loop and record of a training run."""

from ..core.environment import require_extra

require_extra("train", "Training")
