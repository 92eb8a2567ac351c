"""
What `lrlab upstream-patch lr-clock` makes of diffusers' scripts, run: `python -m tests.diffusers_scripts.lr_clock CHECKOUT
[NAME ...]`, with names such as `unconditional`; by default all that have a test and a tiny model that is made here.

In a clone each script's new test runs with the script as it was, where it must fail, and with the patch. It trains on tiny
models in two processes, with an accumulation of 4. The table has the learning rate after each update, over its peak.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from diffusers_lrlab.upstream.lr_clock_patches import ScriptPatch, lr_clock_patches

from .. import hub_folders

_SCRIPTS = Path(__file__).parents[1]
_ON_THE_HUB = ("dreambooth_lora_hidream", "dreambooth_lora_qwen_image")  # whose tiny models are not made here
_TORCHRUN = f"""#!{sys.executable}
import sys
from tests.diffusers_scripts.lr_clock import run_in_processes
sys.exit(run_in_processes(*sys.argv[2:]))
"""


class Run(NamedTuple):
    """A run of a script's new test."""

    passed: bool
    rates: list[float]  # over their peak, after each update
    output: str


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def patched_clone(checkout: Path, folder: Path) -> list[ScriptPatch]:
    """A clone with a branch for each patch, with models and data, and with a `torchrun` that needs no torchvision."""
    identity = ("-c", "user.name=Ada Lovelace", "-c", "user.email=ada@example.org")
    if (checkout / ".git").exists() or (checkout / "HEAD").exists():
        git(checkout, "clone", "--quiet", "--shared", str(checkout), str(folder))
        git(folder, "checkout", "--quiet", "-B", "main")
    else:  # an unpacked archive
        shutil.copytree(checkout, folder)
        git(folder, "init", "--quiet", "--initial-branch", "main")
        git(folder, "add", "--all")
        git(folder, *identity, "commit", "--quiet", "-m", "A commit")
    for setting in identity[1::2]:
        git(folder, "config", *setting.split("=", 1))
    patches = lr_clock_patches(folder)
    hub_folders.make(folder)
    stand_in = folder / ".git" / "bin" / "torchrun"
    stand_in.parent.mkdir()
    stand_in.write_text(_TORCHRUN)
    stand_in.chmod(0o755)
    return patches


def run_in_processes(number: str, *arguments: str) -> int:
    """In place of torchrun: the script runs by `run_script.py`, and its learning rates are noted."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", number]
    status = subprocess.run([*start, str(_SCRIPTS / "run_script.py"), *arguments], check=False).returncode
    words = " ".join(arguments).replace("=", " ").split()
    output = Path(words[words.index("--output_dir") + 1])
    Path(os.environ["LRLAB_RATES"]).write_text(json.dumps(_rates(output)))
    return status


def _rates(output: Path) -> list[float]:
    import torch

    number = len([*output.glob("checkpoint-*")])
    states = [torch.load(output / f"checkpoint-{n}" / "scheduler.bin", weights_only=True) for n in range(1, number + 1)]
    return [state["_last_lr"][0] / state["base_lrs"][0] for state in states]


def run_test(clone: Path, patch: ScriptPatch, with_patch: bool = True) -> Run:
    """A script's new test, on its branch; the script itself may be as it was."""
    git(clone, "checkout", "--quiet", "--force", patch.made)
    if not with_patch:
        git(clone, "checkout", "main", "--", patch.script)
    noted = clone / ".git" / "rates.json"
    noted.unlink(missing_ok=True)
    environment = os.environ | {
        "PATH": f"{clone / '.git' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_SCRIPTS.parents[1]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LRLAB_RATES": str(noted),
    }
    name = Path(patch.script).stem.removeprefix("train_")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        patch.test or "",
        "-k",
        f"test_{name}_lr_schedule",
    ]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    rates = json.loads(noted.read_text()) if noted.exists() else []
    return Run(done.returncode == 0, rates, done.stdout + done.stderr)


def _shown(run: Run) -> str:
    errors = [match[1] for match in re.finditer(r"\b((?!ChildFailed)\w+Error: .*)", run.output)]
    return ", ".join(f"{rate:.3g}" for rate in run.rates) or (errors[0] if errors else "no learning rates")


def main(checkout: Path, names: list[str]) -> None:
    print("| script | before | with the patch | its test |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "diffusers"
        for patch in patched_clone(checkout.resolve(), clone):
            name = Path(patch.script).stem.removeprefix("train_")
            if patch.test and (name in names if names else name not in _ON_THE_HUB):
                before, after = run_test(clone, patch, with_patch=False), run_test(clone, patch)
                verdict = f"{'passes' if before.passed else 'fails'}, then {'passes' if after.passed else 'fails'}"
                print(f"| `{Path(patch.script).name}` | {_shown(before)} | {_shown(after)} | {verdict} |", flush=True)
                if not after.passed and os.environ.get("LRLAB_VERBOSE"):
                    print(after.output[-6000:], file=sys.stderr)
