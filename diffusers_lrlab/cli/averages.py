"""`lrlab ema` and `lrlab merge`: other averages of the weights of a finished run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError
from ..core.extras import require_extra
from ..core.files import folder_beside, new_folder
from ..core.ranges import Range
from .output import say

if TYPE_CHECKING:
    from ..averaging.posthoc import Combination

_NUM = 12  # widths of a sweep
_METRIC = "validation_loss"
_OUT = "Give a new one with --out"


def ema_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="Folder of a finished run that was trained with --ema posthoc.",
    )
    add("--sigma_rel", type=float, metavar="S", help="Width of the average, as a share of the run.")
    add("--sweep", action="store_true", help="Measure many widths, and save the one with the best metric.")
    metrics = "validation_loss, kl, frechet_distance or another metric of samples"
    add("--metric", metavar="NAME", help=f"For --sweep: {metrics} (default: {_METRIC}).")
    add("--num", type=int, metavar="N", help=f"For --sweep: the number of widths (default: {_NUM}).")
    add("--out", type=Path, metavar="DIR", help="Folder for the pipeline (default: RUN-ema).")


def ema(options: argparse.Namespace) -> None:
    if options.sweep == (options.sigma_rel is not None):
        raise LabError("lrlab ema needs either --sigma_rel, such as 0.075, or --sweep.")
    for name in ("metric", "num"):
        if getattr(options, name) is not None and not options.sweep:
            raise LabError(f"--{name} {getattr(options, name)} has no effect without --sweep. Hint: leave it out.")
    require_extra("train", "`lrlab ema`")
    out = options.out or folder_beside(options.run, "-ema")
    with new_folder(out, _OUT) as temporary:
        said = _sweep(options, temporary) if options.sweep else _average(options, temporary)
    say(f"{said}\nWrote {out}{', with ema_sweep.png' if options.sweep else ''}.")


def _average(options: argparse.Namespace, into: Path) -> str:
    from ..run.averages import RunSnapshots

    found = RunSnapshots(options.run).write(into, options.sigma_rel)
    return f"sigma_rel {options.sigma_rel:g}: {_quality(found)}"


def _sweep(options: argparse.Namespace, into: Path) -> str:
    num = _NUM if options.num is None else options.num
    Range("[2, 1000]", whole=True).check("--num", num, "12 is usual")
    from ..run.averages import RunSnapshots
    from ..run.sweep import plot_sweep, sweep_widths

    def show(width: float, value: float) -> None:
        say(f"sigma_rel {width:.4f}: {value:.6g}")

    snapshots, metric = RunSnapshots(options.run), options.metric or _METRIC
    sweep = sweep_widths(snapshots, metric, num, show)
    best = sweep.widths[sweep.best]
    found = snapshots.write(into, best, sweep.about())
    plot_sweep(sweep, into / "ema_sweep.png")
    edge = "It is at the edge of these widths, so a better one may lie beyond them.\n" if sweep.is_at_edge else ""
    return (
        f"as the run saved it: {sweep.of_run:.6g}\nBest {metric}: sigma_rel {best:.4g}. {_quality(found).capitalize()}.\n"
        f"{edge}It was chosen by this metric, so its value is slightly too good."
    )


def _quality(found: Combination) -> str:
    return f"residual of the profile {found.residual:.2%}, largest coefficient {found.largest:.3g}"


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="Folder of a run with checkpoints at a constant learning rate.")
    add("--last", type=int, required=True, metavar="K", help="Number of checkpoints, the newest ones.")
    weights = "Weights of the checkpoints: linear or 1-sqrt for a decay of that shape, or uniform for equal weights"
    add("--weights", metavar="NAME", default="1-sqrt", help=f"{weights} (default: %(default)s).")
    add("--out", type=Path, metavar="DIR", help="Folder for the pipeline (default: RUN-merged).")


def merge(options: argparse.Namespace) -> None:
    require_extra("train", "`lrlab merge`")
    out = options.out or folder_beside(options.run, "-merged")
    from ..run.merge import merge_checkpoints

    about = merge_checkpoints(options.run, options.last, options.weights, out)
    for update, share in about["checkpoints"].items():
        say(f"checkpoint-{update}  {share:.4f}")
    say(f"Wrote {out}. It has no optimizer state and cannot be trained further; continue from a checkpoint instead.")
