"""The `lrlab` command: one file per family of subcommands. They share their output and the option that loads plug-ins."""

import argparse
import json
import sys
from typing import Any

from ..core.environment import is_watched
from ..core.errors import is_first_process


def add_import(parser: argparse.ArgumentParser) -> None:
    """The option `--import`, whose modules are loaded once the command line is read."""
    help = "Comma-separated Python files or modules that register names of your own."
    parser.add_argument("--import", dest="plugins", metavar="FILE_OR_MODULE", help=help)


def add_actions(parser: argparse.ArgumentParser, **actions: str) -> list[argparse.ArgumentParser]:
    """The parsers of the actions of a command, such as `lrlab study run`, from the help of each."""
    group = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    return [group.add_parser(name, help=help, description=f"{help}.", allow_abbrev=False) for name, help in actions.items()]


def announce_loading() -> None:
    """Says in a terminal that torch and transformers are being imported, which takes seconds without other output."""
    if not {"torch", "transformers"} & {*sys.modules} and is_watched() and is_first_process():
        sys.stderr.write("Loading libraries ...\n")
        sys.stderr.flush()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def say_json(value: Any, indent: int | None = None) -> None:
    say(json.dumps(value, indent=indent, allow_nan=False))
