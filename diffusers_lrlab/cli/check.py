"""`lrlab check`: verify the files of a folder."""

import argparse
from pathlib import Path

from ..core.extras import require_extra
from .output import say, say_json


def check_arguments(parser: argparse.ArgumentParser) -> None:
    folders = "Folder of a run, study, toy dataset or set of latents, also a downloaded one."
    parser.add_argument("dir", type=Path, metavar="DIR", help=folders)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def check(options: argparse.Namespace) -> int:
    """Exit status 0 if everything is intact, else 1."""
    require_extra("train", "`lrlab check`")
    from ..run.check import check_folder

    finding = check_folder(options.dir)
    if options.json:
        say_json(finding.as_data(), indent=2)
    else:
        say(finding.describe())
    return int(bool(finding.damaged))
