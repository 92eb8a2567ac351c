"""Commands that make runs: `lrlab train`, `find-lr`, `plan`, `extend` and `ema`.

The scripts of the first two names and `-m diffusers_lrlab.train` are the same programs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.environment import require_extra
from ..core.errors import is_first_process
from ..core.files import folder_beside, new_folder
from ..core.program import exit_status
from . import announce_loading, say


def train(arguments: Sequence[str], prog: str | None = None) -> None:
    """Train an unconditional diffusion pipeline with a learning rate that follows its schedule at every update."""
    announce_loading()
    from ..training.arguments import parse_arguments

    config = parse_arguments(arguments, train.__doc__ or "", prog)
    # Imported after the command line is understood: it takes seconds.
    from ..run.train import run_training

    run_training(config)


def find_lr(arguments: Sequence[str], prog: str | None = None) -> None:
    """Find a learning rate for a training run: short tests in which the rate rises."""
    announce_loading()
    from ..finder.range_test import FinderConfig
    from ..training.arguments import parse_with

    config, settings = parse_with(arguments, find_lr.__doc__ or "", FinderConfig, prog=prog)
    from ..finder.find import find_lr_for_folder

    result, folder = find_lr_for_folder(config, settings)
    if is_first_process():
        say(f"{result.describe()}\nWrote {Path(folder) / 'lrlab'}/lr_finder.json and .png.")


def train_main(prog: str | None = None) -> int:
    """Exit status of training as `sys.argv` says: 0, 2 for a user error, 128 + the signal that stopped it."""
    return exit_status(lambda: train(sys.argv[1:], prog), all_ranks=False)


def find_lr_main() -> int:
    """Like [`train_main`], for the finder."""
    return exit_status(lambda: find_lr(sys.argv[1:]), all_ranks=False)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrlab plan [--option value ...]"
    parser.add_argument_group("options of lrlab train", "All of them; see `lrlab train --help`.")


def plan(options: argparse.Namespace) -> None:
    """Show what a training run will do, and its memory, time and disk space."""
    train([*options.rest, "--dry_run"])


def extend_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="Folder of a finished or stopped run, which stays as it is.")
    add("--max_train_steps", type=int, metavar="N", help="New total length of the run, in optimizer updates.")
    add("--at", type=int, metavar="UPDATE", help="Update of a checkpoint to cool down from.")
    add("--cooldown", type=int, metavar="M", help="Updates of the cool-down.")
    decay = "Shape of the cool-down, one of warmup_stable_decay (default: the run's own, else 1-sqrt)."
    add("--decay", metavar="SHAPE", help=decay)
    add("--out", dest="output_dir", type=Path, metavar="DIR", help="Folder of the new run (default: RUN-N).")
    add("--dry_run", action="store_true", help="Print the curve and where it comes from, without training.")


def extend(options: argparse.Namespace) -> None:
    """Train a run for longer, or cool it down from a checkpoint, as a new run."""
    announce_loading()
    from ..run.extend import extend as extend_run

    names = ("max_train_steps", "at", "cooldown", "decay", "output_dir", "dry_run")
    extend_run(options.run_dir, **{name: getattr(options, name) for name in names})


def ema_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="Folder of a finished run that was trained with --ema posthoc.")
    add("--sigma_rel", type=float, required=True, metavar="S", help="Width of the average, as a share of the run.")
    add("--out", type=Path, metavar="DIR", help="Folder for the pipeline (default: RUN-ema).")


def ema(options: argparse.Namespace) -> None:
    """Average the weights with any width, from the snapshots of a run."""
    announce_loading()
    require_extra("train", "`lrlab ema`")
    from ..run.averages import write_average

    out = options.out or folder_beside(options.run, "-ema")
    with new_folder(out, "Give a new one with --out") as temporary:
        found = write_average(options.run, options.sigma_rel, temporary)
    quality = f"residual of the profile {found.residual:.2%}, largest coefficient {found.largest:.3g}"
    say(f"sigma_rel {options.sigma_rel:g}: {quality}\nWrote {out}.")
