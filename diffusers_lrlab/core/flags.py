"""The parser of every command line: values are text, and errors are [`LabError`]s."""

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from .errors import LabError, cut, must_be, shortened


class TextParser(argparse.ArgumentParser):
    """A parser that takes negative numbers for values, and refuses bytes that are not text."""

    _given: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # As in Python 3.14: earlier versions take -1e-4 for a flag.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # What follows a bare -- belongs to another program.
        self._given = [*takewhile(lambda word: word != "--", sys.argv[1:] if args is None else args)]
        options, unknown = super().parse_known_args(args, namespace)
        # Arguments of another program are passed on as they are.
        own = [action for action in self._actions if action.nargs != argparse.REMAINDER]
        given = [(_name_of(action), getattr(options, action.dest, None)) for action in own]
        for name, value in (*given, *(("an argument", word) for word in unknown)):
            check_is_text(name, value)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required: --"):  # one of which may be misspelt
            known = self._option_string_actions
            unknown = [word for word in self._given if word[:2] == "--" and word.partition("=")[0] not in known]
            message += f"; {shortened(unknown[0])} is unknown" if unknown else ""
        raise LabError(f"{_in_form(message)}. See --help.")


def _in_form(message: str) -> str:
    """A message of argparse in the form of other errors, cut where it repeats something long."""
    message = re.sub(r"^argument (--\w+)/\S+: ", r"\1: ", message)  # a flag's other spellings
    for kind, number in (("int", "a whole number, such as 10000"), ("(?:float|number)", "a number, such as 0.001")):
        message = re.sub(f"invalid {kind} value: (.*)", rf"must be {number}, got \1", message)
    message = re.sub(r"invalid choice: (.*) \(choose from (.*)\)", r"must be one of \2, got \1", message)
    return cut(message)


def _name_of(action: argparse.Action) -> str:
    return (action.option_strings or [str(action.metavar or action.dest)])[0]


def check_is_text(name: str, value: Any) -> None:
    """Raises a `LabError` for bytes that are not UTF-8, which Python passes on as surrogates that no file can hold."""
    for text in map(str, value if isinstance(value, list) else [value]):
        if not (surrogates := re.findall("[\ud800-\udfff]", text)):
            continue
        given = text.encode(errors="surrogateescape") if min(surrogates) >= "\udc80" else text
        hint = "rename a file or folder that has such a name, or give a link to it whose name is UTF-8"
        raise must_be(name, given, "UTF-8 text", hint)
