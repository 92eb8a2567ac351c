"""What the server of `started` imports before any process is forked from it."""

import gc
import importlib

gc.disable()  # imports leave no garbage
for name in (
    "diffusers_lrlab.run.train",
    "diffusers_lrlab.run.finish",
    "diffusers_lrlab.training.arguments",
    "diffusers_lrlab.training.trainer",
    "diffusers_lrlab.cli.main",
    "diffusers_lrlab.hub.card",
    "diffusers_lrlab.preflight.run",
    "diffusers.models.unets.unet_2d",
    "diffusers.pipelines.ddpm.pipeline_ddpm",
    # What a run imports only when it comes to its data, its pictures and its card.
    "datasets",
    "sklearn.datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "diffusers_lrlab.data.digits",
    "diffusers_lrlab.diagnostics.plot",
    "diffusers_lrlab.evaluation.evaluate",
    "diffusers_lrlab.training.plots.images",
    "diffusers_lrlab.training.plots.run",
    "diffusers_lrlab.training.results.images",
    "huggingface_hub.repocard",
    "transformers.hf_argparser",
):
    importlib.import_module(name)
importlib.import_module("PIL.Image").init()  # its readers and writers of files

# The digits, on which most runs train: encoded as a `datasets.Dataset` once, not by every run.
sources = importlib.import_module("diffusers_lrlab.data.sources")
load_image_dataset = sources.load_image_dataset
DIGITS = load_image_dataset("digits")
sources.load_image_dataset = lambda name, **how: (
    DIGITS if (name, how) == ("digits", {"resolution": None}) else load_image_dataset(name, **how)
)
# Collecting garbage, which every run does, need not look at all of this again.
gc.collect()
gc.freeze()
gc.enable()
