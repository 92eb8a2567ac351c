"""`lrlab plan`."""

import argparse

from .training import train


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help`.")


def plan(options: argparse.Namespace) -> None:
    train([*options.rest, "--dry_run"])
