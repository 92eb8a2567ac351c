"""
Diffusers' own scripts under the launcher, unmodified, on tiny random models.

    DIFFUSERS_CHECKOUT=path/to/diffusers python -m pytest -m slow tests/diffusers_scripts
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import started
import torch
from safetensors.torch import load_file

from diffusers_lrlab import lr_curve

from . import tiny_pipelines
from .__main__ import table
from .cases import CASES, command
from .run_script import __file__ as run_script

CHECKOUT = os.environ.get("DIFFUSERS_CHECKOUT")
EXAMPLES = Path(CHECKOUT or ".").resolve() / "examples"
CLOCK = Path(__file__).parents[2] / "contrib" / "diffusers" / "lr_clock.patch"
UPDATES = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="DIFFUSERS_CHECKOUT does not name a checkout of diffusers"),
]
IN_TURN = [
    pytest.param(
        case,
        id=case.name,
        marks=pytest.mark.skipif("lora" in case.name and find_spec("peft") is None, reason="peft is not installed"),
    )
    for case in CASES.values()
]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def run(arguments, launcher=None, processes=1, **changed):
    """Runs a script bare, or under the launcher with these options of it."""
    arguments = [*([] if launcher is None else ["--launcher", *launcher]), *arguments]
    environment = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | changed
    how = {"env": os.environ | environment, "timeout": 600}
    if processes == 1:
        done = started.run(run_script, *arguments, **how)
    else:
        done = started.run_ranks(run_script, *arguments, processes=processes, **how)
    return SimpleNamespace(**dict(zip(("returncode", "stdout", "stderr"), done, strict=True)))


def weights(folder):
    """Everything that was saved, by file and name."""
    files = [path for path in sorted(folder.rglob("*.safetensors")) if "checkpoint-" not in str(path)]
    assert files
    return {f"{path.relative_to(folder)}:{name}": value for path in files for name, value in load_file(path).items()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not value.equal(other[name])]


def trained(case, inputs, output, launcher, processes=1, **options):
    done = run(command(case, EXAMPLES, inputs, output, UPDATES, **options), launcher, processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return weights(output), done.stderr


def test_the_page_has_the_table_of_all_options():
    page = (Path(__file__).parents[2] / "docs/reference/diffusers-scripts.md").read_text()
    assert "\n".join(table(EXAMPLES)) in page


def test_the_patched_clock_is_right_with_accumulation_and_two_processes(inputs, tmp_path):
    images = tiny_pipelines.make_images(tmp_path / "images", num_images=10, captions=False)
    shutil.copytree(EXAMPLES, tmp_path / "patched" / "examples")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply", CLOCK], cwd=tmp_path / "patched", env=environment, check=True)

    def rates(examples, output):
        """After each update, over the peak."""
        given = ["--train_data_dir", images, "--num_epochs", 4, "--checkpointing_steps", 1, "--lr_scheduler", "linear"]
        of_case = command(CASES["unconditional"], examples, inputs, output, UPDATES, accumulation=4, batch_size=1)
        done = run([*of_case, *map(str, given)], processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
        files = [output / f"checkpoint-{number}" / "scheduler.bin" for number in range(1, 9)]
        assert len([*output.glob("checkpoint-*")]) == len(files)
        return [torch.load(file, weights_only=True)["_last_lr"][0] / 1e-3 for file in files]

    before, after = rates(EXAMPLES, tmp_path / "before"), rates(tmp_path / "patched" / "examples", tmp_path / "after")
    assert before == pytest.approx([0.25, 0.5, 0.75, 1, 0.9375, 0.875, 0.8125, 0.75])
    assert after == pytest.approx([0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


@pytest.mark.parametrize("case", IN_TURN)
def test_without_options_nothing_changes(tmp_path, inputs, case):
    bare, _ = trained(case, inputs, tmp_path / "bare", None)
    ours, stderr = trained(case, inputs, tmp_path / "ours", [])
    assert differing(bare, ours) == []
    assert f"LR audit: {UPDATES} updates, every value that follows the clock was as expected." in stderr


@pytest.mark.parametrize("case", IN_TURN[:2])
def test_two_processes(tmp_path, inputs, case):
    _, stderr = trained(
        case, inputs, tmp_path / "two", ["--fix_lr_clock", "--timestep_sampler=logit_normal"], 2, batch_size=1
    )
    assert "every value that follows the clock was as expected" in stderr
    assert "--timestep_sampler logit_normal: timesteps of " in stderr


@pytest.mark.parametrize("case", IN_TURN)
def test_a_learning_rate_is_looked_for(tmp_path, inputs, case):
    """Nothing of the script stays but what was found; --checkpointing_steps would have left checkpoints."""
    arguments = command(case, EXAMPLES, inputs, tmp_path / "run", UPDATES)
    done = run([*arguments, "--checkpointing_steps=5"], ["--find_lr", "--num_updates=20"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 test from 1e-07 to 0.01 in 20 updates" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["lr_finder.json", "lr_finder.png", "lrlab"]


def test_the_audit_changes_no_bit_and_shows_the_curve(tmp_path, inputs):
    """Of a script that counts micro-batches in its schedule."""

    def ended(folder, *before):
        own = command(CASES["unconditional"], EXAMPLES, inputs, folder, 8, accumulation=4, batch_size=1)
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
        start = [*before, sys.executable, run_script, *own]
        done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return weights(folder), done.stderr

    bare, _ = ended(tmp_path / "bare")
    audit = [sys.executable, "-m", "diffusers_lrlab.cli.main", "audit", f"--out={tmp_path}", "--"]
    audited, stderr = ended(tmp_path / "audited", *audit)
    assert differing(bare, audited) == []
    (optimizer,) = json.loads((tmp_path / "lr_audit.json").read_text())["optimizers"]
    assert (optimizer["num_updates"], {*optimizer["backward_passes"]}) == (8, {4})
    assert optimizer["groups"][0]["lr"] == pytest.approx(lr_curve("cosine", 1e-3, 8, 32)[:8].tolist(), rel=1e-12)
    assert {finding["name"] for finding in optimizer["findings"]} & {"too_long", "still_warming_up"}
    assert "LR audit: AdamW (LambdaLR of get_cosine_schedule_with_warmup), 8 updates, 4 backward passes each." in stderr
