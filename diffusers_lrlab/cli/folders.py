"""Commands on finished folders: `lrlab check`, `push` and `pull`."""

import argparse
import shlex
from pathlib import Path

from ..core.environment import require_extra
from ..core.errors import LabError
from .output import announce_loading, say, say_json


def check_arguments(parser: argparse.ArgumentParser) -> None:
    folders = "Folder of a run, study, toy dataset or set of latents, also a downloaded one."
    parser.add_argument("dir", type=Path, metavar="DIR", help=folders)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def check(options: argparse.Namespace) -> int:
    """Exit status 0 if everything is intact, else 1."""
    announce_loading()
    require_extra("train", "`lrlab check`")
    from ..run.check import check_folder

    finding = check_folder(options.dir)
    if options.json:
        say_json(finding.as_data(), indent=2)
    else:
        say(finding.describe())
    return int(bool(finding.damaged))


def push_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="Folder of a run, study or toy dataset.")
    add("--repo_id", required=True, metavar="USER/NAME", help="Repository, created if it is missing.")
    add("--private", action="store_true", help="Make a new repository private.")
    add("--revision", metavar="BRANCH", default="main", help="Branch, created if it is missing (default: %(default)s).")
    add("--create_pr", action="store_true", help="Open a pull request in an existing repository.")
    add("--message", metavar="TEXT", help="Message of the commit (default: the command that made the result).")
    add("--unfinished", action="store_true", help="Upload a run that has not finished.")


def push(options: argparse.Namespace) -> None:
    from ..hub.transfer import Target, push_folder

    if options.create_pr and options.private:
        raise LabError("--private is for new repositories, and --create_pr for existing ones. Leave one of them out.")
    if options.create_pr and options.revision != "main":
        raise LabError(f"--revision {options.revision!r} has no effect with --create_pr. Leave one of them out.")
    if options.message is not None and not options.message.strip():
        raise LabError("--message '' is empty. Leave it out, or say what changed.")
    target = Target(options.repo_id, private=options.private, revision=options.revision, create_pr=options.create_pr)
    say(f"Uploaded: {push_folder(options.dir, target, options.message, options.unfinished)}")


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("repo_id", metavar="USER/NAME", help="Repository.")
    add("--out", type=Path, metavar="DIR", help="New or empty folder (default: the name of the repository).")
    add("--revision", metavar="REVISION", help="Branch, tag or commit (default: main).")


def pull(options: argparse.Namespace) -> None:
    from ..hub.contents import type_of_folder
    from ..hub.transfer import fetch

    out = options.out or Path(options.repo_id.split("/")[-1])
    fetch(options.repo_id, out, options.revision)
    folder = shlex.quote(str(out))
    then = {
        "run": f"lrlab check {folder}; the command that trains it again is in {folder}/README.md",
        "study": f"lrlab study run {folder}/spec.yaml --out NEW",
        "dataset": f"lrlab train --dataset_name {folder}",
    }
    holds = type_of_folder(out)
    say(f"Downloaded a {holds} to {out}. Next, for instance: {then[holds]}")
