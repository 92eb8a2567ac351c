"""`lrlab extend`: runs that continue from the checkpoints of another run."""

import argparse
from pathlib import Path

EXTEND_HELP = "Train a run for longer, or cool it down from a checkpoint, as a new run"


def extend_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="Folder of a finished or stopped run, which stays as it is.")
    add("--max_train_steps", type=int, metavar="N", help="New total length of the run, in optimizer updates.")
    add("--at", type=int, metavar="UPDATE", help="Update of a checkpoint to cool down from.")
    add("--cooldown", type=int, metavar="M", help="Updates of the cool-down.")
    decay = "Shape of the cool-down, one of warmup_stable_decay (default: the run's own, else 1-sqrt)."
    add("--decay", metavar="SHAPE", help=decay)
    add("--out", type=Path, metavar="DIR", help="Folder of the new run (default: RUN-N).")
    add("--dry_run", action="store_true", help="Print the curve and where it comes from, without training.")


def extend(options: argparse.Namespace) -> None:
    from ..run.extend import extend as extend_run

    extend_run(
        options.run_dir,
        options.max_train_steps,
        at=options.at,
        cooldown=options.cooldown,
        decay=options.decay,
        output_dir=options.out,
        dry_run=options.dry_run,
    )
