"""`lrlab check`: whether what a folder holds is whole."""

import argparse
from pathlib import Path

from ..core.extras import require_extra
from .output import say, say_json


def check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="the folder of a run, a study, a toy dataset, or what was downloaded")
    add("--repair", action="store_true", help="renames what is damaged, so that a run or a study goes on from what is whole")
    add("--json", action="store_true", help="the same as data")


def check(options: argparse.Namespace) -> int:
    """0 if everything is whole, else 1."""
    require_extra("train", "`lrlab check`")
    from ..run.check import check_folder

    finding = check_folder(options.dir, options.repair)
    if options.json:
        say_json(finding.as_data(), indent=2)
    else:
        say(finding.describe())
    return int(bool(finding.damaged))
