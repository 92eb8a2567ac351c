"""Shared by all commands: printing, the parser, and the option that loads plug-ins."""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from ..core.errors import LabError, shortened, shortened_message
from ..core.flags import TextParser


class LabParser(TextParser):
    """A parser whose errors are [`LabError`]s."""

    _given: Sequence[str] = ()

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("args")
        # What follows a bare -- belongs to another program.
        self._given = [*takewhile(lambda word: word != "--", sys.argv[1:] if given is None else given)]
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: --"):  # one of which may be misspelt
            known = self._option_string_actions
            unknown = [word for word in self._given if word.startswith("--") and word.partition("=")[0] not in known]
            message += f"; {shortened(unknown[0])} is unknown" if unknown else ""
        raise LabError(f"{shortened_message(message)}. See {self.prog} --help.")


def add_import(parser: argparse.ArgumentParser) -> None:
    """The option `--import`, whose modules are loaded once the command line is read."""
    help = "Comma-separated Python files or modules that register names of your own."
    parser.add_argument("--import", dest="plugins", metavar="FILE_OR_MODULE", help=help)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def say_json(value: Any, indent: int | None = None) -> None:
    say(json.dumps(value, indent=indent, allow_nan=False))
