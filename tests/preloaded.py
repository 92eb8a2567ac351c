"""What the server of `started` imports before any process is forked from it."""

import gc
import importlib

gc.disable()  # imports leave no garbage
for name in (
    "diffusers_lrlab.run.train",
    "diffusers_lrlab.run.record",
    "diffusers_lrlab.training.arguments",
    "diffusers_lrlab.training.trainer",
    "diffusers_lrlab.cli.main",
    "diffusers_lrlab.hub.card",
    "diffusers_lrlab.preflight.checks",
    "diffusers.models.unets.unet_2d",
    "diffusers.pipelines.ddpm.pipeline_ddpm",
    # What a run imports only when it comes to its data, its pictures and its card.
    "datasets",
    "sklearn.datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "diffusers_lrlab.diagnostics.plot",
    "diffusers_lrlab.evaluation.metrics",
    "diffusers_lrlab.models.networks",
    "diffusers_lrlab.objective.processes",
    "diffusers_lrlab.optimizers.layers",
    "diffusers_lrlab.training.plots",
    "diffusers_lrlab.training.results",
    "huggingface_hub.repocard",
    "transformers.hf_argparser",
):
    importlib.import_module(name)
importlib.import_module("PIL.Image").init()  # its readers and writers of files

kept_digits = importlib.import_module("kept_digits")
kept_digits.keep_digits()
kept_digits.decode_digits()  # here, not in every process
# Collecting garbage, which every run does, need not look at all of this again.
gc.collect()
gc.freeze()
gc.enable()
