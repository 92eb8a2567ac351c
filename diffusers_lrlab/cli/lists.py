"""`lrlab list`."""

import argparse
import importlib
import shutil
import sys

from ..core.errors import LabError, did_you_mean
from ..core.listing import as_json, as_markdown, as_text
from .output import say, say_json

# The registry of each word that `lrlab list` takes, and the training option that takes its names.
LISTED = {
    "schedulers": ("schedules.registries", "SCHEDULERS", "--lr_scheduler"),
    "momentum": ("schedules.registries", "MOMENTUM_SCHEDULERS", "--momentum_scheduler"),
    "timesteps": ("timesteps.registries", "TIMESTEP_SAMPLERS", "--timestep_sampler"),
    "weightings": ("timesteps.registries", "LOSS_WEIGHTINGS", "--loss_weighting"),
    "timestep_lrs": ("timesteps.registries", "TIMESTEP_LRS", "--timestep_lr"),
    "objectives": ("objective.process", "OBJECTIVES", "--objective"),
    "noises": ("objective.noise", "NOISES", "--noise"),
    "optimizers": ("optimizers.entries", "OPTIMIZERS", "--optimizer"),
    "ema_forms": ("averaging.forms", "EMA_FORMS", "--ema"),
    "denoisers": ("models.registry", "DENOISERS", "--denoiser"),
    "images": ("data.image_sets", "IMAGE_DATASETS", "--dataset_name"),
    "datasets": ("data.toy2d", "TOY_DATASETS", "--dataset_name"),
}


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(LISTED)} (default: all of them).")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="Print everything that is known, as JSON.")
    formats.add_argument("--markdown", action="store_true", help="Print tables with all arguments, as in the documentation.")


def list_names(options: argparse.Namespace) -> None:
    if options.kind is not None and options.kind not in LISTED:
        hint = did_you_mean(options.kind, LISTED)
        raise LabError(f"There is nothing to list called {options.kind!r}.{hint} Known: {', '.join(LISTED)}.")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    registries = {}
    for word in [options.kind] if options.kind else LISTED:
        module, name, _ = LISTED[word]
        registries[word] = getattr(importlib.import_module(f"diffusers_lrlab.{module}"), name)
    if options.json:
        say_json({word: as_json(registry) for word, registry in registries.items()}, indent=2)
    elif options.markdown:
        say("\n\n".join(map(as_markdown, registries.values())))
    else:
        say("\n\n".join(as_text(registry, LISTED[word][2], width) for word, registry in registries.items()))
