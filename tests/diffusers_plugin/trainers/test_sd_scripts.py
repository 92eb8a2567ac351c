"""sd-scripts' train_network.py, whole and unmodified, on a tiny Stable Diffusion on the CPU under the launcher.

LRLAB_SD_SCRIPTS names a checkout, LRLAB_SD_SCRIPTS_PYTHON an interpreter with its requirements. In a copy, the widths of the
U-Net are changed, which are constants of `library/original_unet.py`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_sd_scripts import WIDTHS

from diffusers_lrlab import lr_curve

CHECKOUT = os.environ.get("LRLAB_SD_SCRIPTS")
PYTHON = os.environ.get("LRLAB_SD_SCRIPTS_PYTHON", sys.executable)
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
N, RATE = 6, 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="LRLAB_SD_SCRIPTS does not name a checkout of kohya-ss/sd-scripts"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the pipeline, the images, and the checkout with a narrow U-Net."""
    folder = tmp_path_factory.mktemp("sd-scripts")
    subprocess.run([PYTHON, HERE / "tiny_sd_scripts.py", folder], check=True, capture_output=True)
    shutil.copytree(CHECKOUT, folder / "checkout", ignore=shutil.ignore_patterns(".git"))
    path = folder / "checkout" / "library" / "original_unet.py"
    text, changed = re.subn(r"(?m)^(BLOCK_OUT_CHANNELS.*) = .*$", rf"\1 = {WIDTHS}", path.read_text(encoding="utf-8"))
    assert changed == 1
    path.write_text(text, encoding="utf-8")
    return folder


def train(home, name, *arguments, options=None, fails=False, before=()):
    """Runs the program bare, or under the launcher with options and the spy; its output folder and its messages."""
    out = home / name
    command = [*before, PYTHON]
    if options is not None:
        command += ["-m", "diffusers_lrlab.launch", "--import", HERE / "spy.py", *options]
    command += ["train_network.py", f"--pretrained_model_name_or_path={home / 'pipeline'}", f"--output_dir={out}"]
    command += [f"--tokenizer_cache_dir={home / 'tokenizers'}", f"--train_data_dir={home / 'images'}", "--output_name=lora"]
    command += ["--resolution=64", "--network_module=networks.lora", "--network_dim=4", f"--max_train_steps={N}", "--seed=3"]
    command += ["--train_batch_size=2", f"--learning_rate={RATE}", "--max_data_loader_n_workers=0", "--no_metadata"]
    command += ["--optimizer_type=AdamW", "--save_precision=float", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "SPY": str(home / name)}
    done = subprocess.run(
        [*map(str, command)], cwd=home / "checkout", env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert bool(done.returncode) == fails, done.stderr[-3000:]
    return out, done.stderr


def rates_of(home, name):
    return json.loads((home / f"{name}.json").read_text())


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_options_its_weights_have_the_bits_of_the_bare_program(home):
    bare, _ = train(home, "bare")
    launched, _ = train(home, "launched", options=[])
    assert same(load_file(bare / "lora.safetensors"), load_file(launched / "lora.safetensors"))


def test_the_audit_changes_no_bit(home):
    bare, _ = train(home, "unaudited", "--lr_scheduler=cosine", "--lr_warmup_steps=2")
    audit = [sys.executable, "-m", "diffusers_lrlab.cli.main", "audit", f"--out={home}", "--"]
    audited, stderr = train(home, "audited", "--lr_scheduler=cosine", "--lr_warmup_steps=2", before=audit)
    assert same(load_file(bare / "lora.safetensors"), load_file(audited / "lora.safetensors"))
    (optimizer,) = json.loads((home / "lr_audit.json").read_text())["optimizers"]
    np.testing.assert_allclose(optimizer["groups"][0]["lr"], lr_curve("cosine", RATE, 2, N), rtol=1e-12)
    assert f"{N} updates, 1 backward pass each." in stderr


def test_the_curve_runs_with_accumulation_and_after_a_resume(home):
    options = ["--strict", "--strict_lr_audit"]
    arguments = ["--lr_scheduler=rex:d=0.9", "--lr_warmup_steps=2", "--gradient_accumulation_steps=2"]
    out, stderr = train(home, "whole", *arguments, "--save_state", "--save_every_n_steps=3", options=options)
    assert "6 updates, every value that follows the clock was" in stderr
    rates = rates_of(home, "whole")
    np.testing.assert_allclose(rates, lr_curve("rex:d=0.9", RATE, 2, N), rtol=1e-12)
    train(home, "resumed", *arguments, f"--resume={out / 'lora-step00000003-state'}", options=options)
    np.testing.assert_allclose(rates_of(home, "resumed"), rates[3:], rtol=1e-12)
