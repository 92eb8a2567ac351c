"""What most of the scripts import: a forkserver of `multiprocessing` loads it, which is forked for each of them."""

import importlib

import datasets  # noqa: F401
import matplotlib.pyplot as plt  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

from . import run_script  # noqa: F401

for name in ("auto_pipeline", "controlnet", "flux.pipeline_flux", "lumina2.pipeline_lumina2"):
    importlib.import_module(f"diffusers.pipelines.{name}")
