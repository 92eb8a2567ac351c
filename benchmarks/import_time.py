"""The cost of imports: seconds of each line in fresh interpreters, median of several.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys
from functools import partial

from common import SCRIPT, in_turns, machine, make_parser, parse

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import diffusers.optimization": ["-c", "import diffusers.optimization"],
    "from diffusers import DDPMPipeline": ["-c", "from diffusers import DDPMPipeline"],
    "import diffusers_lrlab": ["-c", "import diffusers_lrlab"],
    "import diffusers_lrlab, diffusers.optimization": ["-c", "import diffusers_lrlab, diffusers.optimization"],
    "train_ddpm.py --help": [str(SCRIPT), "--help"],
    "train_ddpm.py --dry_run --lr_scheduler cosin (an error)": [str(SCRIPT), "--dry_run", "--lr_scheduler", "cosin"],
}


def run(arguments):
    """One interpreter."""
    result = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if result.returncode != (2 if "cosin" in arguments else 0):
        raise SystemExit(f"{arguments} ended with {result.returncode}; its time means nothing")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(commands=list(COMMANDS))
    options = parse(parser, rounds=1, commands=list(COMMANDS)[:2])
    times = in_turns({name: partial(run, COMMANDS[name]) for name in options.commands}, options.rounds)
    print(machine())
    print(f"\n| | s, median of {options.rounds} |\n|---|---|")
    for name, values in times.items():
        print(f"| `{name}` | {statistics.median(values) / 1e3:.2f} |")


if __name__ == "__main__":
    main()
