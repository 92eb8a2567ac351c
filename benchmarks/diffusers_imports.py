"""CPU seconds that imports of diffusers take after those of torch and accelerate, as installed and with the patches
`lazy_dynamo` and `lazy_models` of contrib/diffusers.

    OMP_NUM_THREADS=1 python benchmarks/diffusers_imports.py
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import diffusers
from common import machine, make_parser, parse

CONTRIB = Path(__file__).parents[1] / "contrib" / "diffusers"
PATCHES = {"as installed": [], "lazy_dynamo": ["lazy_dynamo"], "lazy_models": ["lazy_models"]}
PATCHES["both"] = ["lazy_dynamo", "lazy_models"]
NAMES = ["DDPMScheduler", "ModelMixin", "UNet2DModel"]
CODE = """
import time, torch, accelerate
started = time.process_time()
from diffusers import {name}
print(time.process_time() - started)
"""


def patched_copy(folder, patches):
    """A folder for `PYTHONPATH` with a copy of the installed diffusers and patches."""
    shutil.copytree(Path(diffusers.__file__).parent, folder / "src/diffusers", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        command = ["git", "apply", "--include=src/*", str(CONTRIB / f"{patch}.patch")]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "src"


def seconds(path, name):
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-c", CODE.format(name=name)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each import")
    options = parse(parser, turns=1)
    print(f"{machine()}; medians of {options.turns} (quartiles)\n")
    print(f"| | {' | '.join(f'`{name}`' for name in NAMES)} |\n|---|{'---|' * len(NAMES)}")
    with tempfile.TemporaryDirectory() as folder:
        copies = {title: patched_copy(Path(folder, title), patches) for title, patches in PATCHES.items()}
        times = {(title, name): [] for title in copies for name in NAMES}
        for _ in range(options.turns + 1):
            for title, name in times:
                times[title, name].append(seconds(copies[title], name))
    for title in copies:
        cells = []
        for name in NAMES:
            timed = times[title, name][1:]  # the first compiles
            low, median, high = statistics.quantiles(timed, n=4) if len(timed) > 1 else timed * 3
            cells.append(f"{median:.2f} ({low:.2f}-{high:.2f})")
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
