"""`lrlab list`."""

import argparse
import importlib
import shutil
import sys

from ..core.errors import LabError, did_you_mean
from ..core.listing import as_json, as_markdown, as_text
from .output import say, say_json

# Where each kind of thing that has a name is registered, and the option of the training script that takes the name.
KINDS = {
    "schedulers": ("schedules.registries", "SCHEDULERS", "--lr_scheduler"),
    "momentum": ("schedules.registries", "MOMENTUM_SCHEDULERS", "--momentum_scheduler"),
    "timesteps": ("timesteps.registries", "TIMESTEP_SAMPLERS", "--timestep_sampler"),
    "weightings": ("timesteps.registries", "LOSS_WEIGHTINGS", "--loss_weighting"),
    "timestep_lrs": ("timesteps.registries", "TIMESTEP_LRS", "--timestep_lr"),
    "noises": ("objective.noise", "NOISES", "--noise"),
    "optimizers": ("optimizers.entries", "OPTIMIZERS", "--optimizer"),
    "denoisers": ("models.registry", "DENOISERS", "--denoiser"),
    "datasets": ("data.toy2d_entries", "TOY_DATASETS", "--dataset_name"),
}


def list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}; all of them if not given")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    form.add_argument("--markdown", action="store_true", help="tables with all arguments, as in the documentation")


def list_names(options: argparse.Namespace) -> None:
    if options.kind is not None and options.kind not in KINDS:
        raise LabError(
            f"There is no kind {options.kind!r} of things to list.{did_you_mean(options.kind, KINDS)} "
            f"Known: {', '.join(KINDS)}."
        )
    registries = {}
    for kind in [options.kind] if options.kind else KINDS:
        module, name, _ = KINDS[kind]
        registries[kind] = getattr(importlib.import_module(f"diffusers_lrlab.{module}"), name)
    if options.json:
        say_json({kind: as_json(registry) for kind, registry in registries.items()}, indent=2)
    elif options.markdown:
        say("\n\n".join(map(as_markdown, registries.values())))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        say("\n\n".join(as_text(registry, KINDS[kind][2], width) for kind, registry in registries.items()))
