"""`lrlab train` and `lrlab find-lr`: the same programs as the scripts of those names and `-m diffusers_lrlab.train`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import is_first_process
from ..core.program import exit_status
from .loading import announce_loading
from .output import say

TRAIN_HELP = "Train an unconditional diffusion pipeline with a learning rate that follows its schedule at every update."
FIND_LR_HELP = "Find a learning rate for a training run: short tests in which the rate rises."


def train(arguments: Sequence[str], prog: str | None = None) -> None:
    """Trains as arguments say; `prog` is the command in `--help`, the script's if not given."""
    from ..training.arguments import parse_arguments

    config = parse_arguments(arguments, TRAIN_HELP, prog)
    # Imported after the command line is understood: it takes seconds.
    from ..run.train import run_training

    run_training(config)
    if config.dry_run and is_first_process():
        import psutil

        seconds = time.time() - psutil.Process().create_time()
        say(f"{'dry run':>13}  {seconds:.3g} s in all, with imports and the data")


def find_lr(arguments: Sequence[str], prog: str | None = None) -> None:
    """Finds a learning rate as arguments say."""
    from ..finder.range_test import FinderConfig
    from ..training.arguments import parse_with

    config, settings = parse_with(arguments, FIND_LR_HELP, FinderConfig, prog=prog)
    from ..finder.find import find_lr_for_folder

    result, folder = find_lr_for_folder(config, settings)
    if is_first_process():
        say(f"{result.describe()}\nWrote {Path(folder) / 'lrlab'}/lr_finder.json and .png.")


def train_main(prog: str | None = None) -> int:
    """Exit status of training as `sys.argv` says: 0, 2 for a user error, 128 + the signal that stopped it."""
    announce_loading()
    return exit_status(lambda: train(sys.argv[1:], prog), all_ranks=False)


def find_lr_main() -> int:
    """Like [`train_main`], for the finder."""
    announce_loading()
    return exit_status(lambda: find_lr(sys.argv[1:]), all_ranks=False)
