"""`lrlab study list`, `run`, `report` and `card`, and what `training_scripts/run_study.py` shares with them."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..core.errors import LabError, did_you_mean
from ..core.extras import require_extra
from ..study.runs.precision import PRECISIONS
from ..study.same_command import finished_report, shown_command, shown_path
from .output import say

ACTIONS = ("list", "run", "report", "card")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = "list: shows the presets; run: does what is left to do; report: writes the report anew; "
    parser.add_argument("action", metavar="ACTION", help=f"{actions}card: copies what to publish")
    what = "of run, a YAML file or the name of a preset; else the folder of a study"
    parser.add_argument("what", nargs="?", metavar="WHAT", help=what)
    add_run_arguments(parser)
    add = parser.add_argument
    figures = "of report: every picture also in report/figures/, as a paper takes it, pdf, png or svg"
    add("--figures", metavar="FORMAT", help=figures)
    width = "of --figures: their width, such as that of a column; by default each is as wide as in the report"
    add("--figure_width", type=float, metavar="INCHES", help=width)
    add("--dpi", type=int, metavar="N", help="of --figures: dots per inch, of PNGs and of samples in the others; 300")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`, which `training_scripts/run_study.py` takes too."""
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="the folder of the study; results that are there are kept")
    executors = "in this process: stacked or local, for all runs; by default stacks of all runs that can be stacked. As by "
    executors += "default, but by several workers: pool, on the GPUs or cores of this machine, or ray, on a cluster. What a "
    executors += "worker loses when it dies, hangs or runs out of memory is done again, by smaller stacks if need be"
    add("--executor", metavar="NAME", help=executors)
    stack_size = "runs side by side at most; 20, and 256 on a GPU; with pool and ray, 1 is each run by itself, as local does"
    add("--stack_size", type=int, metavar="N", help=stack_size)
    workers = "of pool and ray: how many; one for each GPU, or else for each core, and its threads are a share of the cores"
    add("--workers", type=int, metavar="N", help=workers)
    addresses = "of ray: a cluster that runs already, or auto; else RAY_ADDRESS, or this machine alone"
    add("--address", metavar="ADDRESS", help=addresses)
    precisions = "; ".join(f"{name}: {precision.description}" for name, precision in PRECISIONS.items())
    add("--precision", metavar="NAME", help=f"{precisions}; fp32, or that of the study that a spec.yaml is of")
    add("--dry_run", action="store_true", help="prints the runs, and what they will take by a short measurement, and stops")


def command(options: argparse.Namespace) -> None:
    require_extra("study", "`lrlab study`")
    if options.action not in ACTIONS:
        raise LabError(
            f"There is no action {options.action!r}.{did_you_mean(options.action, ACTIONS)} Known: {', '.join(ACTIONS)}."
        )
    if (options.what is None) != (options.action == "list"):
        raise LabError(f"`lrlab study {options.action}` takes {'nothing' if options.what else 'a study'}. See --help.")
    figures = {"figures": options.figures, "figure_width": options.figure_width, "dpi": options.dpi}
    if options.action != "report" and (given := [name for name, value in figures.items() if value is not None]):
        raise LabError(f"--{given[0]} is of `lrlab study report DIR`. Leave it out of `lrlab study {options.action}`.")
    if options.action == "run":
        run(options, "lrlab study run")
        return
    form = {"list": "list", "card": "card DIR --out CARD", "report": "report DIR"}[options.action]
    names = ("executor", "stack_size", "workers", "address", "precision")
    of_run = options.dry_run or any(getattr(options, name) is not None for name in names)
    if of_run or (options.out is not None) != ("--out" in form):
        raise LabError(f"The form is `lrlab study {form}`, without other options.")
    if options.action == "list":
        from ..study.spec.presets_table import presets_text

        say(presets_text())
    elif options.action == "card":
        from ..study.report.card import write_study_card

        say(f"Wrote {write_study_card(Path(options.what), options.out)}.")
    else:
        from ..study.run import report_study

        say(f"Wrote {report_study(Path(options.what), _figures(options))}.")


def _figures(options: argparse.Namespace) -> Any:
    """The `Figures` that were asked for, if any."""
    from ..study.report.plots import Figures

    given = {"width": options.figure_width, "dpi": options.dpi}
    given = {name: value for name, value in given.items() if value is not None}
    if options.figures is not None:
        return Figures(options.figures, **given)
    if given:
        raise LabError("--figure_width and --dpi have no effect without --figures. Add --figures pdf, png or svg.")
    return None


def run(options: argparse.Namespace, program: str) -> None:
    """Runs the study `options.what`; `program` is the command up to it, for the report."""
    require_extra("study", "A study")
    if options.out is None and not options.dry_run:
        raise LabError("Where to? Give --out DIR, a new folder, or that of the study to go on with.")
    if not options.dry_run and (page := _finished_before(options, program)):
        say(f"This study is finished, and nothing is left to do. Its report: {page}")
        return
    from ..study.spec.reading import load_spec

    spec = load_spec(options.what)
    if options.precision is not None:
        spec = dataclasses.replace(spec, precision=options.precision)
    if options.dry_run:
        from ..study.forecast import describe_study

        asked = options.executor, options.stack_size, options.out, options.workers, options.address
        say(describe_study(spec, *asked))
        return
    from ..study.run import run_study

    command = _shown(options, program, None if spec.precision == "fp32" else spec.precision)
    how = options.executor, options.stack_size, options.workers, options.address, options.precision
    say(f"Wrote {run_study(options.what, options.out, *how, command=command)}.")


def _shown(options: argparse.Namespace, program: str, precision: str | None) -> str:
    """The command as the report shows it; an address is only of this cluster."""
    plugins = ",".join(map(shown_path, (options.plugins or "").split(","))) if options.plugins else None
    given = {"executor": options.executor, "stack_size": options.stack_size, "workers": options.workers}
    return shown_command(program, options.what, options.out, given | {"precision": precision, "import": plugins})


def _finished_before(options: argparse.Namespace, program: str) -> Path | None:
    """The report of a study that this very command has finished."""
    if options.address is not None:
        return None
    return finished_report(options.what, options.out.expanduser(), _shown(options, program, options.precision))
