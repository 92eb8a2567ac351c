"""`lrlab plan`, `scale` and `env`."""

import argparse

from ..core.errors import LabError
from ..core.ranges import COUNT, POSITIVE, Range
from .output import say, say_json
from .training import train


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help all`.")


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
