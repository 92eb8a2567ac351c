"""`lrlab push`, `pull`, `rerun` and `schedule`: uploads, downloads and published schedules."""

import argparse
import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import Any

from ..core.errors import LabError, printable
from ..core.held import refuse_damaged
from ..core.ranges import Range
from ..core.words import counted
from ..hub.access import Target
from .output import say


def push_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="Folder of a run, study, toy dataset or schedule.")
    add("--repo_id", required=True, metavar="USER/NAME", help="Repository, created if it is missing.")
    add("--private", action="store_true", help="Make a new repository private.")
    add("--revision", metavar="BRANCH", default="main", help="Branch, created if it is missing (default: %(default)s).")
    add("--create_pr", action="store_true", help="Open a pull request in an existing repository.")
    add("--message", metavar="TEXT", help="Message of the commit (default: the command that made the result).")
    add(
        "--space", action="store_true", help="Upload only the report of a study, or a page with its card, as a static Space."
    )
    weights = "Upload the checkpoints of a run, or the weights of a study, too."
    add("--include_checkpoints", action="store_true", help=weights)
    add("--unfinished", action="store_true", help="Upload a run that has not finished.")


def push(options: argparse.Namespace) -> None:
    from ..hub.publish import push_folder

    if options.create_pr and options.private:
        raise LabError("--private is for new repositories, and --create_pr for existing ones. Leave one of them out.")
    if options.create_pr and options.revision != "main":
        raise LabError(f"--revision {options.revision!r} has no effect with --create_pr. Leave one of them out.")
    if options.message is not None and not options.message.strip():
        raise LabError("--message '' is empty. Leave it out, or say what changed.")
    target = Target(options.repo_id, private=options.private, revision=options.revision, create_pr=options.create_pr)
    contents = {name: getattr(options, name) for name in ("space", "include_checkpoints", "unfinished")}
    published = push_folder(options.dir, target, options.message, **contents)
    say(f"Uploaded and verified {counted(published.num_files, 'file')}: {published.url}")


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("repo_id", metavar="USER/NAME", help="Repository.")
    add("--out", type=Path, metavar="DIR", help="New or empty folder (default: the name of the repository).")
    add("--revision", metavar="REVISION", help="Branch, tag or commit (default: main).")


def pull(options: argparse.Namespace) -> None:
    from ..hub.contents import type_of_folder
    from ..hub.fetch import fetch

    out = options.out or Path(options.repo_id.split("/")[-1])
    fetch(options.repo_id, out, options.revision)
    folder = shlex.quote(str(out))
    then = {
        "run": f"lrlab rerun {folder} --compare",
        "study": f"lrlab study run {folder}/spec.yaml --out NEW",
        "schedule": f"lrlab preview --lr_scheduler hub:{options.repo_id} --num_training_steps 10000",
        "dataset": f"lrlab train --dataset_name {folder}",
    }
    holds = type_of_folder(out)
    say(f"Downloaded a {holds} to {out}. Next, for instance: {then[holds]}")


def rerun_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab rerun DIR|USER/NAME [--compare] [--out DIR] [--option value ...]"
    add = parser.add_argument
    add("source", metavar="DIR|USER/NAME", help="Folder of a run, or its repository.")
    add("--compare", action="store_true", help="Compare weights, learning rates, losses and results with the record.")
    add("--out", type=Path, metavar="DIR", help="Folder of the new run (default: NAME-rerun).")
    add("--revision", metavar="REVISION", help="Branch, tag or commit of the repository (default: main).")
    tolerance = "Relative difference allowed in another environment (default: 0.05)."
    add("--tolerance", type=float, metavar="SHARE", help=tolerance)
    parser.add_argument_group("options of lrlab train", "They override recorded ones; see `lrlab train --help`.")


# These would overwrite the recorded run, or replace its record.
_NOT_AGAIN = ("__config", "__output_dir")


def rerun(options: argparse.Namespace) -> None:
    if options.tolerance is not None:
        if not options.compare:
            raise LabError("--tolerance has no effect without --compare. Add it or leave it out.")
        Range("[0, inf)").check("--tolerance", options.tolerance, "it is a relative difference, such as 0.05")
    for given in options.rest:
        if given.partition("=")[0].replace("-", "_") in _NOT_AGAIN:
            raise LabError(f"{given!r} has no effect on a rerun, which follows the record. Use --out DIR for its folder.")
    source = Path(options.source)
    if source.is_dir():
        if options.revision is not None:
            raise LabError(f"--revision {options.revision!r} is for repositories, and {options.source!r} is a folder.")
        _rerun(source, source.resolve().name, options)
        return
    from ..hub.fetch import fetch

    if "/" not in options.source or options.source.count("/") > 1:
        raise LabError(
            f"{options.source!r} is neither a folder nor a repository USER/NAME. Give one of them before the options."
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = fetch(options.source, Path(temporary) / "record", options.revision, expected="run")
        _rerun(folder, options.source.split("/")[-1], options)


def _rerun(folder: Path, name: str, options: argparse.Namespace) -> None:
    import yaml

    from ..hub.records import read_log, read_record
    from ..hub.rerun import TOLERANCE, compare_runs, repeated_options, without_replaced, write_comparison
    from ..run.train import run_training
    from ..training.arguments import parse_arguments

    remedy = "restore the file from a copy, or pull the run again."
    refuse_damaged(folder, "run", remedy, only=lambda file: options.compare or file.startswith("lrlab/run."))
    recorded = without_replaced(repeated_options(folder), options.rest)
    read_log(folder)  # errors come before training
    record = read_record(folder)
    source = record["config"].get("lr_scheduler_source")
    if not any(given.partition("=")[0] in ("--import", "--plugins") for given in options.rest):
        _refuse_without_code(record)
    out = options.out or Path(f"{name}-rerun")
    if out.resolve() == folder.resolve():
        raise LabError(f"--out {str(out)!r} is the folder of the recorded run. Give another one.")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "recorded.yaml"
        file.write_text(yaml.safe_dump(recorded), encoding="utf-8")
        config = parse_arguments(["--config", str(file), "--output_dir", str(out), *options.rest], "")
    if isinstance(source, str) and not any("scheduler" in given or "--lr_" in given for given in options.rest):
        config = dataclasses.replace(config, lr_scheduler_source=source)  # the same schedule
    try:
        trained = run_training(config)
    except LabError as error:
        error.args = (str(error).replace("--output_dir", "--out"),)  # the flag that this command has
        raise
    if trained is None or not options.compare:
        return
    comparison = compare_runs(folder, trained, TOLERANCE if options.tolerance is None else options.tolerance)
    write_comparison(comparison, trained)
    say(printable(comparison.describe()))
    if not comparison.agrees and not comparison.settings:
        raise LabError(f"{options.source!r} was not reproduced; both are kept, the new run in {str(out)!r}.")


def _refuse_without_code(record: dict[str, Any]) -> None:
    """Raises a `LabError` for a run with user code, which is not in its record."""
    if plugins := record["meta"].get("plugins"):
        raise LabError(
            f"This run used {', '.join(one['name'] for one in plugins)}, whose code is not in its record. Read that code, "
            "then give it: --import FILE_OR_MODULE."
        )
    if names := record["run"].get("program_registrations"):
        raise LabError(
            f"This run was started by a Python program that registered {', '.join(map(repr, names))}, with code that is "
            "not in its record. Put that code into a file, without the call of train(), and give it: --import FILE."
        )


def schedule_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="New or empty folder.")
    add("--lr_scheduler", required=True, metavar="SPEC", help="Name or spec string; join makes one of several.")
    add("--momentum_scheduler", metavar="SPEC", help="Momentum schedule, as a name or spec string (default: none).")
    add("--num_training_steps", type=int, default=10_000, metavar="N", help="Updates in the plot (default: %(default)s).")
    add("--num_warmup_steps", type=int, metavar="W", help="Warm-up updates in the plot (default: a twentieth).")
    add("--license", metavar="NAME", help="License for the card, such as apache-2.0 (default: none).")


def schedule(options: argparse.Namespace) -> None:
    from ..hub.schedule_folder import write_schedule_folder

    schedules = options.lr_scheduler, options.momentum_scheduler
    write_schedule_folder(options.dir, *schedules, options.num_training_steps, options.num_warmup_steps, options.license)
    say(
        f"Wrote {options.dir}. Publish it: lrlab push {shlex.quote(str(options.dir))} --repo_id USER/NAME\n"
        "Then train with it: --lr_scheduler hub:USER/NAME"
    )
