"""Find the learning rate of a training run before it, by short tests in which the rate rises.

    accelerate launch training_scripts/find_lr.py
    accelerate launch training_scripts/find_lr.py --dataset_name dino --optimizer sgd --repeats 5

Takes the options of train_ddpm.py, and writes lr_finder.json and lr_finder.png into lrlab/ of --output_dir.
"""

import os
import sys
from pathlib import Path

from diffusers_lrlab.core.errors import exit_status
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.training.arguments import parse_with


def run() -> None:
    """Parses and tests."""
    config, settings = parse_with(sys.argv[1:], __doc__.partition("\n")[0], FinderConfig)
    from diffusers_lrlab.finder.find import find_lr_for_folder

    result, folder = find_lr_for_folder(config, settings)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{result.describe()}\nWrote {Path(folder) / 'lrlab'}/lr_finder.json and .png.")


def main() -> int:
    """Turns errors that the user can mend into one message and the exit status 2."""
    return exit_status(run, all_ranks=False)


if __name__ == "__main__":
    sys.exit(main())
