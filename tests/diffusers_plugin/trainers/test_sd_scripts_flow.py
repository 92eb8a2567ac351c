"""`--loss_weighting` in programs of sd-scripts' flow matching: SD 3, which converts its velocity to data, and Lumina 2.

The library is made of small functions here, or of sd-scripts' own, from the checkout that an environment variable names.
"""

import ast
import json
import sys

import numpy as np
import pytest
from launched_here import launch_here
from own_code import checkout

from diffusers_lrlab.diffusers_plugin.trainer_table import TRAINERS

TRAIN_UTIL = """
def conditional_loss(model_pred, target, loss_type, reduction, huber_c=None):
    return torch.nn.functional.mse_loss(model_pred, target, reduction=reduction)


def get_timesteps(min_timestep, max_timestep, b_size, device):
    raise NotImplementedError
"""
SD3 = """
def compute_density_for_timestep_sampling(weighting_scheme, batch_size, logit_mean, logit_std, mode_scale):
    return torch.rand(batch_size)


def compute_loss_weighting_for_sd3(weighting_scheme, sigmas=None):
    return torch.ones_like(sigmas)


def get_noisy_model_input_and_timesteps(args, latents, noise, device, dtype):
    sigmas = torch.rand(len(latents)).view(-1, 1, 1, 1)
    return sigmas * noise + (1.0 - sigmas) * latents, sigmas.flatten() * 1000, sigmas
"""
LUMINA = """
def get_noisy_model_input_and_timesteps(args, noise_scheduler, latents, noise, device, dtype):
    sigmas = torch.rand(len(latents)).view(-1, 1, 1, 1)
    return sigmas * noise + (1.0 - sigmas) * latents, sigmas.flatten() * 1000, sigmas


def apply_model_prediction_type(args, model_pred, noisy_model_input, sigmas):
    return model_pred, None
"""
LIBRARY = {"train_util": TRAIN_UTIL, "sd3_train_utils": SD3, "lumina_train_util": LUMINA}

# The loops of sd3_train.py and lumina_train.py from the noise to the loss.
PROGRAM = """
import argparse, json
import torch
from accelerate import Accelerator
from library import lumina_train_util, sd3_train_utils, train_util

parser = argparse.ArgumentParser()
for flag, default in {"weighting_scheme": "uniform", "model_prediction_type": "raw", "timestep_sampling": "sigmoid"}.items():
    parser.add_argument(f"--{flag}", default=default)
for flag, default in {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, "training_shift": 1.0, "seed": 3}.items():
    parser.add_argument(f"--{flag}", type=float, default=default)
args = parser.parse_args()
args.min_timestep = args.max_timestep = args.ip_noise_gamma = None
args.loss_type, args.sigmoid_scale = "l2", 1.0
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Conv2d(2, 2, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
rows = []
for step in range(3):
    latents, noise = torch.randn(2, 8, 2, 4, 4)
    if IS_SD3:
        given = (args, latents, noise, "cpu", torch.float32)
        noisy, timesteps, sigmas = sd3_train_utils.get_noisy_model_input_and_timesteps(*given)
        model_pred = model(noisy) * (-sigmas) + noisy
        weighting = sd3_train_utils.compute_loss_weighting_for_sd3(weighting_scheme=args.weighting_scheme, sigmas=sigmas)
        target = latents
    else:
        scheduler = argparse.Namespace(config=argparse.Namespace(num_train_timesteps=1000))
        given = (args, scheduler, latents, noise, "cpu", torch.float32)
        noisy, timesteps, sigmas = lumina_train_util.get_noisy_model_input_and_timesteps(*given)
        model_pred, weighting = lumina_train_util.apply_model_prediction_type(args, model(noisy), noisy, sigmas)
        target = latents - noise
    loss = train_util.conditional_loss(model_pred.float(), target.float(), args.loss_type, "none", None)
    if weighting is not None:
        loss = loss * weighting
    loss = loss.mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    errors = (model_pred - target).square().mean(dim=(1, 2, 3)).tolist()
    rows.append({"sigmas": sigmas.flatten().tolist(), "errors": errors, "loss": loss.item()})
with open("rows.json", "w") as file:
    json.dump(rows, file)
"""


def make_library(folder, own):
    for name in TRAINERS["sd-scripts"].files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name, text in LIBRARY.items():
        if own:
            path = checkout("sd-scripts") / "library" / f"{name}.py"
            names = {node.name for node in ast.parse(text).body}
            text = "\n\n".join(
                ast.unparse(node)
                for node in ast.parse(path.read_text(encoding="utf-8")).body
                if getattr(node, "name", "") in names
            )
        start = "from __future__ import annotations\nimport math\nimport torch\n"
        (folder / "library" / f"{name}.py").write_text(start + text)


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Runs the program under the launcher in this process; returns its rows and messages."""

    def run(is_sd3, own, *options, arguments=(), status=0):
        make_library(tmp_path, own)
        (tmp_path / "program.py").write_text(f"IS_SD3 = {is_sd3}\n{PROGRAM}")
        monkeypatch.chdir(tmp_path)
        try:
            found = launch_here(tmp_path / "program.py", *arguments, options=options)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "library"]:
                del sys.modules[name]
        stderr = capfd.readouterr().err
        assert found == status, stderr
        return [] if status else json.loads((tmp_path / "rows.json").read_text()), stderr

    return run


MIN_SNR = ["--loss_weighting=min_snr", "--timestep_sampler=logit_normal:mean=1", "--strict"]


@pytest.mark.parametrize("own", [False, True], ids=["shape", "checkout"])
@pytest.mark.parametrize("is_sd3", [False, True], ids=["Lumina 2", "SD 3"])
def test_the_weights_are_those_of_the_error_of_the_program(train, is_sd3, own):
    """Min-SNR is on the error of the image, as SD 3's is; that of a velocity is 1 / sigma^2 as large."""
    rows, stderr = train(is_sd3, own, *MIN_SNR)
    for row in rows:
        sigmas = np.array(row["sigmas"])
        weights = np.minimum(((1 - sigmas) / sigmas) ** 2, 5.0)
        weights = weights if is_sd3 else weights * sigmas**2
        np.testing.assert_allclose(row["loss"], np.mean(weights * row["errors"]), rtol=1e-4)
    assert "--loss_weighting min_snr: 3 losses weighted." in stderr


def test_weights_of_the_program_itself_are_refused(train):
    _, stderr = train(True, False, *MIN_SNR, arguments=["--weighting_scheme=cosmap"], status=2)
    assert "--loss_weighting: must be used without --weighting_scheme of sd-scripts, got --weighting_scheme cosmap" in stderr
