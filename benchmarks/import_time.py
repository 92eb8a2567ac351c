"""The cost of imports: seconds of each line in fresh interpreters, and until a command says something; medians of several.

python benchmarks/import_time.py
"""

import os
import pty
import statistics
import subprocess
import sys
import tempfile
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
FIRST_WORDS = ["list", "scale", "preview", "plan", "check", "env", "train --help", "train", "find-lr", "study report"]


def first_word(command):
    """One interpreter, until it writes to its terminal; it is killed then."""
    parent, child = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "diffusers_lrlab", *command.split()], stdout=child, stderr=child, cwd=folder
        )
        os.read(parent, 1)
        process.kill()
        process.wait()
    os.close(child)
    os.close(parent)


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
    words = in_turns({f"lrlab {name}": partial(first_word, name) for name in FIRST_WORDS}, options.rounds)
    print(machine())
    print(f"\n| | s, median of {options.rounds} |\n|---|---|")
    for name, values in times.items():
        print(f"| `{name}` | {statistics.median(values) / 1e3:.2f} |")
    print(f"\n| until its first word on a terminal | s, median of {options.rounds} |\n|---|---|")
    for name, values in words.items():
        print(f"| `{name}` | {statistics.median(values) / 1e3:.2f} |")


if __name__ == "__main__":
    main()
