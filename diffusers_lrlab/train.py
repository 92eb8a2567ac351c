"""Training from the command line, as by `training_scripts/train_ddpm.py`, without a clone.

accelerate launch -m diffusers_lrlab.train --lr_scheduler cosine
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """Keeps `diffusers_lrlab.train` callable when this module is imported."""

    def __call__(self, config: Any) -> Path | None:
        from .run.train import train

        return train(config)


if __name__ == "__main__":
    from diffusers_lrlab.cli.training import train_main

    sys.exit(train_main("accelerate launch -m diffusers_lrlab.train"))

sys.modules[__name__].__class__ = _CallableModule
