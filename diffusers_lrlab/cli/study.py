"""`lrlab study list`, `run` and `report`; `training_scripts/run_study.py` shares `run`."""

import argparse
from pathlib import Path

from ..core.environment import require_extra
from ..core.errors import LabError
from ..study.shown_command import finished_report, names_in, shown_command, shown_names, shown_path
from . import add_actions, add_import, announce_loading, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = {"list": "Show the presets", "run": "Start or continue a study", "report": "Write the report of a study again"}
    _, run, report = add_actions(parser, **actions)
    add_run_arguments(run)
    report.add_argument("what", type=Path, metavar="DIR", help="Folder of the study.")
    add_import(report)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`, which `training_scripts/run_study.py` takes too."""
    add = parser.add_argument
    add("what", metavar="SPEC", help="A YAML file, or the name of a preset.")
    add("--out", type=Path, metavar="DIR", help="Folder of the study, in which finished results are kept.")
    datasets = (
        "Datasets in place of those of the study, separated by commas or in repeated flags: embedded ones, local folders "
        "or Hub ids."
    )
    add("--dataset_name", action="append", metavar="NAME", help=datasets)
    executors = (
        "In this process: stacked or local (default: stacked where possible). With workers: pool, on the GPUs or cores of "
        "this machine, or ray, on the cluster at RAY_ADDRESS, whose nodes share the folder of --out."
    )
    add("--executor", metavar="NAME", help=executors)
    stack_size = (
        "Largest number of runs in a stack; with pool and ray, 1 trains each run alone, as local does (default: 20; 256 on "
        "a GPU)."
    )
    add("--stack_size", type=int, metavar="N", help=stack_size)
    workers = "Workers of pool and ray, which share the cores (default: one per GPU, else one per core)."
    add("--workers", type=int, metavar="N", help=workers)
    add("--dry_run", action="store_true", help="Print the runs and a measured forecast of their time, and stop.")
    add_import(parser)


def command(options: argparse.Namespace) -> None:
    """Compare schedules, optimizers or any other setting over data sets and seeds."""
    require_extra("study", "`lrlab study`")
    if options.action == "run":
        run(options, "lrlab study run")
    elif options.action == "list":
        from ..study.spec.reading import presets_text

        say(presets_text())
    else:
        from ..study.report.report import report_study

        say(f"Wrote {report_study(options.what)}.")


def run(options: argparse.Namespace, program: str) -> None:
    """Runs the study `options.what`; `program` is the command up to it, for the report."""
    announce_loading()
    require_extra("study", "A study")
    if options.out is None and not options.dry_run:
        raise LabError("--out DIR is missing. Give a new folder, or the folder of the study to continue.")
    names = names_in(options.dataset_name)
    if options.dry_run:
        from ..study.forecast import describe_study

        asked = options.executor, options.stack_size, options.out, options.workers
        say(describe_study(options.what, *asked, dataset_name=names))
        return
    plugins = ",".join(map(shown_path, (options.plugins or "").split(","))) if options.plugins else None
    given = {"dataset_name": shown_names(names), "executor": options.executor, "stack_size": options.stack_size}
    given |= {"workers": options.workers, "import": plugins}
    command = shown_command(program, options.what, options.out, given)
    if page := finished_report(options.what, options.out.expanduser(), command):  # before torch is imported
        say(f"This study is finished. Its report: {page}")
        return
    from ..study.run import run_study

    how = options.executor, options.stack_size, options.workers
    say(f"Wrote {run_study(options.what, options.out, *how, command=command, dataset_name=names or None)}.")
