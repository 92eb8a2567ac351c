"""`lrlab plan`, `scale`, `upstream-patch` and `plugin`."""

import argparse
from pathlib import Path

from ..core.errors import LabError
from ..core.ranges import COUNT, POSITIVE, Range
from .output import say
from .training import train


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help`.")


def plan(options: argparse.Namespace) -> None:
    train([*options.rest, "--dry_run"])


def scale_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--learning_rate", type=float, required=True, metavar="LR", help="Rate that is known to be good.")
    add(
        "--base_batch_size",
        type=int,
        default=64,
        metavar="B",
        help="Images per update at that rate (default: %(default)s).",
    )
    add("--train_batch_size", type=int, metavar="B", help="Images per process and micro-batch of the new run.")
    add("--gradient_accumulation_steps", type=int, default=1, metavar="g", help="Its micro-batches (default: %(default)s).")
    add("--num_processes", type=int, default=1, metavar="n", help="Its processes (default: %(default)s).")
    add("--adam_beta2", type=float, default=0.999, metavar="X", help="beta2 of the known run (default: %(default)s).")
    add("--adam_weight_decay", type=float, metavar="X", help="Weight decay of the known run, decoupled from the gradient.")
    add("--max_train_steps", type=int, metavar="N", help="Updates of the known run, with --adam_weight_decay.")
    add("--width_base", type=int, metavar="N", help="Show the rates at other widths, where this is the width of LR.")
    add("--width", type=int, metavar="W", help="Width of the new model, with --width_base.")


def scale(options: argparse.Namespace) -> None:
    from ..optimizers.scaling import Settings, accumulation_in_words, decay_in_words, scaling_table, width_table

    POSITIVE.check("--learning_rate", options.learning_rate, "1e-4 is usual")
    for name in ("train_batch_size", "gradient_accumulation_steps", "num_processes", "base_batch_size"):
        COUNT.check(f"--{name}", getattr(options, name), "64 images in 1 micro-batch and 1 process are usual")
    batch, num_parts = options.train_batch_size, options.gradient_accumulation_steps * options.num_processes
    if batch is None and num_parts > 1:
        raise LabError("--gradient_accumulation_steps and --num_processes have no effect without --train_batch_size.")
    Range("(0, 1)").check("--adam_beta2", options.adam_beta2, "0.999 is usual")
    POSITIVE.check("--adam_weight_decay", options.adam_weight_decay, "0.01 is usual")
    COUNT.check("--max_train_steps", options.max_train_steps, "it is the length of the run with the known rate")
    if options.max_train_steps is not None and options.adam_weight_decay is None:
        raise LabError(
            f"--max_train_steps {options.max_train_steps} has no effect without --adam_weight_decay. Hint: leave it out."
        )
    if options.width is not None and options.width_base is None:
        raise LabError(f"--width {options.width} has no effect without --width_base. Hint: add that, or leave --width out.")
    if options.width_base is not None:
        if batch is not None:
            raise LabError(
                f"--train_batch_size {batch} has no effect with --width_base, whose table lists widths. Hint: leave one of "
                "them out."
            )
        if options.adam_weight_decay is not None:
            raise LabError("--adam_weight_decay has no effect with --width_base, whose table lists factors. Leave it out.")
        say(width_table(options.learning_rate, options.width_base, options.width))
        return
    known = Settings(options.learning_rate, options.adam_beta2, options.adam_weight_decay)
    say(scaling_table(known, options.base_batch_size, batch and batch * num_parts))
    if options.adam_weight_decay is not None:
        say("\n" + decay_in_words(known, options.base_batch_size, options.max_train_steps))
    if batch is not None and options.gradient_accumulation_steps > 1 and options.num_processes == 1:
        say("\n" + accumulation_in_words(known, options.base_batch_size, batch, options.gradient_accumulation_steps))


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
