"""`lrlab extend` and `lrlab branch`: runs that continue from the checkpoints of another run."""

import argparse
from pathlib import Path

EXTEND_HELP = "Train a run for longer, with its schedule over the new length or with another curve"
BRANCH_HELP = "Cool a run with a plateau down from any of its checkpoints; each branch is a separate run"


def extend_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="Folder of a finished or stopped run, which stays as it is.")
    length = "New total length of the run, in optimizer updates."
    add("--max_train_steps", type=int, required=True, metavar="N", help=length)
    rewarm = "Raise the rate again over W updates, or a fraction of the added ones (0.05 if W is left out), up to the same "
    rewarm += "schedule over the new length, then follow that; for example, after a cosine that has ended."
    add("--rewarm", type=float, nargs="?", const=0.05, metavar="W", help=rewarm)
    then = "Another schedule that takes over at the last checkpoint, scaled to the rate there: a name or spec string."
    add("--then", metavar="SPEC", help=then)
    tolerance = (
        "Largest difference, as a share of the peak, allowed between the rates before the checkpoint and those of the "
    )
    tolerance += "same schedule over the new length; 0 requires equal rates (default: %(default)s)."
    add("--tolerance", type=float, default=0.01, metavar="X", help=tolerance)
    add("--out", type=Path, metavar="DIR", help="Folder of the extended run (default: RUN-N).")
    add("--dry_run", action="store_true", help="Print the curve and where it comes from, without training.")


def extend(options: argparse.Namespace) -> None:
    from ..run.extend import extend as extend_run

    extend_run(
        options.run_dir,
        options.max_train_steps,
        rewarm=options.rewarm,
        then=options.then,
        tolerance=options.tolerance,
        output_dir=options.out,
        dry_run=options.dry_run,
    )


def branch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="Folder of a run with a plateau; it may still be training.")
    add("--at", required=True, metavar="UPDATES", help="Updates of checkpoints, such as 2000,4000,8000, or latest.")
    cooldown = "Updates of the cool-down, or below 1 as a fraction of the whole branch."
    add("--cooldown", type=float, required=True, metavar="N", help=cooldown)
    decay = "Shape of the cool-down, one of warmup_stable_decay (default: the run's own, else 1-sqrt)."
    add("--decay", metavar="NAME", help=decay)
    changes = "Parameters of the optimizer during the cool-down, such as beta2=0.9995."
    add("--with", dest="changes", metavar="KEY=VALUE", help=changes)
    add("--out", type=Path, metavar="DIR", help="Folder of the branches (default: RUN-branches).")
    workers = "Branches to train at the same time, each in a separate process (default: %(default)s)."
    add("--workers", type=int, default=1, metavar="N", help=workers)
    address = (
        "Running Ray cluster that trains the branches, or auto; its nodes must share the folders (default: this machine)."
    )
    add("--address", metavar="ADDRESS", help=address)
    add("--dry_run", action="store_true", help="Print the curves, without training.")


def branch(options: argparse.Namespace) -> None:
    from ..run.branch import branch as branch_run
    from ..run.branch import parse_changes

    branch_run(
        options.run_dir,
        options.at,
        options.cooldown,
        decay=options.decay,
        optimizer_kwargs=parse_changes(options.changes),
        output_dir=options.out,
        workers=options.workers,
        address=options.address,
        dry_run=options.dry_run,
    )
