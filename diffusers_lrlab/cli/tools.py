"""`lrlab plan`, `upstream-patch`, `plugin` and `env`."""

import argparse
from pathlib import Path

from ..core.errors import LabError
from .output import say, say_json
from .training import train


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help all`.")


def plan(options: argparse.Namespace) -> None:
    train([*options.rest, "--dry_run"])


def upstream_patch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = "A schedule, lr-clock for the schedule length in diffusers' scripts, or a correction of another trainer."
    add("name", metavar="NAME", help=names)
    clone = "Clone of diffusers, or of the other trainer."
    add("--diffusers", "--checkout", dest="checkout", required=True, type=Path, metavar="CHECKOUT", help=clone)
    add("--script", metavar="NAME", help="For lr-clock, one script such as train_text_to_image_sdxl (default: all).")
    add("--out", type=Path, metavar="FILE.patch", help="Write the patch to a file and leave the clone as it is.")
    add("--branch", metavar="NAME", help="New branch to commit to (default: named after the schedule or script).")


def upstream_patch(options: argparse.Namespace) -> None:
    from ..upstream import lr_clock_patches, patch, trainer_patches

    if options.name == lr_clock_patches.NAME:
        patches = lr_clock_patches.lr_clock_patches(options.checkout, options.script, options.out, options.branch)
        if options.script is not None and patches[0].state == "refused":
            raise LabError(f"{patches[0].script} is left as it is: {patches[0].detail}.")
        say(lr_clock_patches.table(patches))
        return
    if options.script is not None:
        raise LabError(f"--script is for lr-clock, not for {options.name!r}. Leave it out.")
    is_trainers = options.name in trainer_patches.CHANGES
    make = trainer_patches.trainer_patch if is_trainers else patch.upstream_patch
    made = make(options.name, options.checkout, out=options.out, branch=options.branch)
    say(f"Wrote {made}." if options.out else f"Committed to the new branch {made} of {options.checkout}.")


def plugin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="The trainer: ai-toolkit.")
    parser.add_argument("dir", type=Path, metavar="DIR", help="Folder where the trainer is installed.")


def plugin(options: argparse.Namespace) -> None:
    from ..upstream.trainer_plugins import write_plugin

    say(f"Wrote {write_plugin(options.name, options.dir)}. {options.name} now takes all names of `lrlab list schedulers`.")


def environment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def environment(options: argparse.Namespace) -> None:
    from ..core.environment import describe_devices, describe_environment, missing_packages

    found = describe_environment() | {"devices": describe_devices(), "missing": missing_packages()}
    if options.json:
        say_json(found, indent=2)
        return
    rows = {**found.pop("versions"), **found}
    rows["missing"] = "; ".join(f"{extra}: {', '.join(names)}" for extra, names in rows["missing"].items()) or "nothing"
    rows["devices"] = ", ".join(rows["devices"])
    rows["plugins"] = ", ".join(plugin["name"] for plugin in rows["plugins"]) or "none"
    say("\n".join(f"{name:>16}  {value}" for name, value in rows.items()))
