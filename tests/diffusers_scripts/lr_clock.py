"""
The new test of `contrib/diffusers/lr_clock.patch`, run in a clone: it trains a tiny model in two processes.

`torchrun` is replaced by this file, run as a script: it needs no torchvision, and notes the learning rates.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCRIPTS, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PATCH = ROOT / "contrib" / "diffusers" / "lr_clock.patch"
SCRIPT = "examples/unconditional_image_generation/train_unconditional.py"
TEST = "examples/unconditional_image_generation/test_unconditional.py"


class Run(NamedTuple):
    passed: bool
    rates: list[float]  # over their peak, after each update
    output: str


def patched_copy(checkout: Path, folder: Path) -> None:
    """A copy of the examples with the patch, with models and data, and with a `torchrun` of its own."""
    from . import hub_folders

    shutil.copytree(checkout / "examples", folder / "examples")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "--include=examples/*", str(PATCH)], cwd=folder, check=True)
    hub_folders.make(folder)
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" "$@"\n')
    torchrun.chmod(0o755)


def run_test(folder: Path) -> Run:
    noted = folder / "rates.json"
    noted.unlink(missing_ok=True)
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LRLAB_RATES": str(noted),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, "-k", "lr_schedule"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Run(done.returncode == 0, json.loads(noted.read_text()) if noted.exists() else [], done.stdout + done.stderr)


def _run_in_processes(arguments: list[str]) -> int:
    start = [sys.executable, "-m", "torch.distributed.run", *arguments[:2], str(SCRIPTS / "run_script.py"), *arguments[2:]]
    status = subprocess.run(start, check=False).returncode
    words = " ".join(arguments).replace("=", " ").split()
    Path(os.environ["LRLAB_RATES"]).write_text(json.dumps(_rates(Path(words[words.index("--output_dir") + 1]))))
    return status


def _rates(output: Path) -> list[float]:
    import torch

    number = len([*output.glob("checkpoint-*")])
    states = [torch.load(output / f"checkpoint-{n}" / "scheduler.bin", weights_only=True) for n in range(1, number + 1)]
    return [state["_last_lr"][0] / state["base_lrs"][0] for state in states]


if __name__ == "__main__":
    sys.exit(_run_in_processes(sys.argv[1:]))
