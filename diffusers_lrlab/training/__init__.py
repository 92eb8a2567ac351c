"""Configuration, plan, loop and record of a training run."""

from ..core.extras import require_extra

require_extra("train", "Training")
