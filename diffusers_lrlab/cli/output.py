"""What all commands share: how they print, and how they refuse arguments."""

import argparse
import json
import sys
from typing import Any, NoReturn

from ..core.errors import LabError
from ..core.spec import shortened_message


class LabParser(argparse.ArgumentParser):
    """A parser whose errors are [`LabError`]s."""

    def error(self, message: str) -> NoReturn:
        raise LabError(f"{shortened_message(message)}. See {self.prog} --help.")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def say_json(value: Any, indent: int | None = None) -> None:
    say(json.dumps(value, indent=indent, allow_nan=False))
