"""`lrlab list`."""

import argparse
import importlib
import shutil
import sys

from ..core.errors import LabError, did_you_mean
from ..core.listing import as_json, as_markdown, as_text
from .output import say, say_json

# By the word that `lrlab list` takes: where those names are registered, and the option of training that takes them.
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
    "datasets": ("data.toy2d_entries", "TOY_DATASETS", "--dataset_name"),
}


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(LISTED)}; all of them if not given")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    form.add_argument("--markdown", action="store_true", help="tables with all arguments, as in the documentation")


def list_names(options: argparse.Namespace) -> None:
    if options.kind is not None and options.kind not in LISTED:
        raise LabError(
            f"There is no kind {options.kind!r} of things to list.{did_you_mean(options.kind, LISTED)} "
            f"Known: {', '.join(LISTED)}."
        )
    registries = {}
    for word in [options.kind] if options.kind else LISTED:
        module, name, _ = LISTED[word]
        registries[word] = getattr(importlib.import_module(f"diffusers_lrlab.{module}"), name)
    if options.json:
        say_json({word: as_json(registry) for word, registry in registries.items()}, indent=2)
    elif options.markdown:
        say("\n\n".join(map(as_markdown, registries.values())))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        say("\n\n".join(as_text(registry, LISTED[word][2], width) for word, registry in registries.items()))
