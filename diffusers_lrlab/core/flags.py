"""Flags that may be repeated."""

import argparse
from typing import Any


class JoinedValues(argparse._StoreAction):
    """A flag that may be repeated: spec strings are joined by `|`. Like other flags, they replace the value in a file."""

    _given_to: argparse.Namespace | None = None  # by this command line

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if namespace is self._given_to:
            values = f"{getattr(namespace, self.dest)}|{values}"
        self._given_to = namespace
        super().__call__(parser, namespace, values, option_string)
