"""A parser of flags whose values are text."""

import argparse
import re
from typing import Any

from .errors import must_be


class TextParser(argparse.ArgumentParser):
    """A parser that takes negative numbers for values, and refuses bytes that are not text."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # As in Python 3.14: earlier versions take -1e-4 for a flag.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        options, unknown = super().parse_known_args(*args, **kwargs)
        # Arguments of another program are passed on as they are.
        own = [action for action in self._actions if action.nargs != argparse.REMAINDER]
        given = [(_name_of(action), getattr(options, action.dest, None)) for action in own]
        for name, value in (*given, *(("an argument", word) for word in unknown)):
            check_is_text(name, value)
        return options, unknown


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
