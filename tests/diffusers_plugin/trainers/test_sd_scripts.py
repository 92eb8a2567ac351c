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
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from tiny_sd_scripts import WIDTHS

from diffusers_lrlab import get_loss_weighting, get_timestep_sampler, lr_curve
from diffusers_lrlab.core.streams import stream_generator

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


def spied(home, name):
    return json.loads((home / f"{name}.json").read_text()), load_file(home / f"{name}.safetensors")


def of_stable_diffusion():
    return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


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


def test_sampler_weighting_and_average_act_with_accumulation_and_after_a_resume(home):
    options = ["--timestep_sampler=clts:sigma=0.5", "--loss_weighting=min_snr:gamma=1", "--ema=constant:decay=0.8"]
    options += ["--strict", "--strict_lr_audit"]
    arguments = [
        "--lr_scheduler=rex:d=0.9",
        "--lr_warmup_steps=2",
        "--gradient_accumulation_steps=2",
        "--train_batch_size=4",
    ]
    saves = ["--save_state", "--save_every_n_steps=3"]
    out, stderr = train(home, "whole", *arguments, *saves, options=options)
    for text in (
        "timesteps of 12 batches replaced",
        "12 losses weighted",
        "6 updates, every value that follows the clock was",
    ):
        assert text in stderr
    seen, weights = spied(home, "whole")
    np.testing.assert_allclose(seen["rates"], lr_curve("rex:d=0.9", RATE, 2, N), rtol=1e-12)
    check_timesteps(seen["timesteps"])
    check_losses(seen)
    check_average(out / "lrlab" / "ema", weights)

    state = out / "lora-step00000003-state"
    train(home, "resumed", *arguments, f"--resume={state}", options=options)
    later, _ = spied(home, "resumed")
    np.testing.assert_allclose(later["rates"], seen["rates"][3:], rtol=1e-12)
    assert later["timesteps"] == seen["timesteps"][6:]


def check_timesteps(drawn):
    """They are those of the sampler's own stream at each update, in two micro-batches."""
    sampler = get_timestep_sampler("clts:sigma=0.5", 1000, N, of_stable_diffusion())
    for update in range(N):
        expected = sampler.sample(8, update, stream_generator(3, "timesteps", update))
        assert drawn[2 * update] + drawn[2 * update + 1] == expected.tolist()


def check_losses(seen):
    """The loss that is differentiated is the mean of weights times errors."""
    weighting = get_loss_weighting("min_snr:gamma=1", of_stable_diffusion())
    assert len(seen["errors"]) == len(seen["losses"]) == len(seen["timesteps"])
    some = weighting.weights(torch.tensor(seen["timesteps"]))
    assert some.min() < 0.9 * some.max()
    for errors, loss, timesteps in zip(seen["errors"], seen["losses"], seen["timesteps"], strict=True):
        weights = weighting.weights(torch.tensor(timesteps))
        assert loss == pytest.approx((weights * torch.tensor(errors)).mean().item(), rel=1e-5)


def check_average(folder, weights):
    """The written average is that of the weights after each update, from the second on with the decay of 0.8."""
    (path,) = folder.glob("*.safetensors")
    written = sorted((each for name, each in load_file(path).items() if not name.endswith(".alpha")), key=lambda x: x.sum())
    indices = {name.partition(".")[2] for name in weights}
    averages = []
    for index in indices:
        average = weights[f"1.{index}"]
        for update in range(2, N + 1):
            average = 0.8 * average + 0.2 * weights[f"{update}.{index}"]
        averages.append(average)
    averages.sort(key=lambda x: x.sum())
    assert len(averages) == len(written)
    ours, theirs = (torch.cat([each.flatten().sort().values for each in all_]) for all_ in (averages, written))
    assert torch.allclose(ours.sort().values, theirs.sort().values, atol=1e-6)
