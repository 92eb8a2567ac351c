"""The cost of the checks before training.

    python benchmarks/preflight.py
    python benchmarks/preflight.py --dataset_name moons

Takes the options of train_ddpm.py; prints the seconds of each check, the first time in a process, and of all of them.
"""

import tempfile
import time
from pathlib import Path

from common import make_parser

from diffusers_lrlab.preflight.checks import CHECKS
from diffusers_lrlab.preflight.data_checks import Subject
from diffusers_lrlab.training.arguments import parse_arguments
from diffusers_lrlab.training.prepare import prepare
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer


def main():
    options, rest = make_parser(__doc__).parse_known_args()
    plan, data, accelerator = prepare(parse_arguments([*rest, *["--dataset_name=line"] * options.tiny], ""))
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Trainer(plan, data, accelerator, RunFolder(Path(folder))))
        total = 0.0
        print("| check | s |\n|---|---|")
        for name, check in CHECKS.items():
            started = time.perf_counter()
            check(subject)
            seconds = time.perf_counter() - started
            total += seconds
            print(f"| {name} | {seconds:.3f} |")
        print(f"| all | {total:.2f} |")


if __name__ == "__main__":
    main()
