"""
Given by --import: what the hooks should have done in a script, by other means, into the folder $BESIDE.

`rows.json` has a row for each micro-batch, read from the script's own variables where it calls `backward`: timesteps that
grow with the noise, the squared error of each image, the loss, and what it should be. `updates.json` has the learning rates
of each update, and which parameters differ from those that lion_pytorch's Lion, made by hand, trains with the same
gradients. `ema.safetensors` is diffusers' EMAModel, stepped with the optimizer.
"""

import functools
import json
import math
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from lion_pytorch import Lion
from safetensors.torch import save_file

WARMUP = 2
_rows, _updates, _kept = [], [], {}
_prepare, _backward, _end = Accelerator.prepare, Accelerator.backward, Accelerator.end_training


@functools.wraps(_prepare)
def prepare(accelerator, *parts, **options):
    prepared = _prepare(accelerator, *parts, **options)
    for optimizer in (part for part in parts if isinstance(part, torch.optim.Optimizer)):
        models = [part for part in parts if isinstance(part, torch.nn.Module)]
        named = {name: each for model in models for name, each in model.named_parameters()}
        train_beside({name: each for name, each in named.items() if each.requires_grad}, optimizer)
    return prepared


def train_beside(named, optimizer):
    copies = {name: each.detach().clone().requires_grad_() for name, each in named.items()}
    lion = Lion([*copies.values()], lr=1e-3, betas=(0.9, 0.99), weight_decay=optimizer.param_groups[0]["weight_decay"])
    ema = EMAModel(named.values(), use_ema_warmup=True, power=3 / 4, foreach=True)
    num_updates = int(os.environ["BESIDE_UPDATES"])

    def before(*step):
        _updates.append({"lrs": sorted({group["lr"] for group in optimizer.param_groups})})
        done = len(_updates) - 1
        share = done / WARMUP if done < WARMUP else 0.5 + math.cos(math.pi * (done - WARMUP) / (num_updates - WARMUP)) / 2
        lion.param_groups[0]["lr"] = 1e-3 * share
        for name, copy in copies.items():
            copy.grad = None if named[name].grad is None else named[name].grad.clone()
        lion.step()

    def after(*step):
        _updates[-1]["differ"] = [name for name, copy in copies.items() if not torch.allclose(copy, named[name], 1e-6, 1e-9)]
        ema.step(named.values())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    _kept.update(named=named, ema=ema)


@functools.wraps(_backward)
def backward(accelerator, loss, **options):
    frame = sys._getframe(1)
    while frame.f_code.co_filename != sys.modules["__main__"].__file__:
        frame = frame.f_back
    _rows.append(row_of(frame.f_locals, loss))
    _backward(accelerator, loss, **options)


def row_of(variables, loss):
    predicted = variables["model_output" if "model_output" in variables else "model_pred"].float()
    target = variables["noise" if "model_output" in variables else "target"].float()
    errors = (predicted - target).square().flatten(1).mean(1)
    scheduler = variables["noise_scheduler"]
    if "indices" in variables:
        sigmas, last = variables["sigmas"].double().flatten(), scheduler.config.num_train_timesteps - 1
        is_of_data = "Lumina" in type(variables["transformer"]).__name__
        timesteps = variables["indices"] if is_of_data else last - variables["indices"]
        noise = 1 - sigmas if is_of_data else sigmas
        snr = ((1 - noise) / noise) ** 2
        factor = noise**2  # min(SNR, 5) of the image's error, which is noise^2 times that of the velocity
    else:
        timesteps = variables["timesteps"]
        alphas = scheduler.alphas_cumprod[timesteps].double()
        snr = alphas / (1 - alphas)
        factor = 1 / snr  # the noise is predicted
    weighted = (snr.clamp(max=5) * factor * errors).mean()
    values = {"timesteps": timesteps, "errors": errors, "loss": loss, "expected_loss": weighted}
    return {name: value.tolist() for name, value in values.items()}


@functools.wraps(_end)
def end_training(accelerator):
    if accelerator.is_main_process:
        folder = Path(os.environ["BESIDE"])
        folder.mkdir()
        for name, rows in (("rows", _rows), ("updates", _updates)):
            (folder / f"{name}.json").write_text(json.dumps(rows))
        save_file(dict(zip(_kept["named"], _kept["ema"].shadow_params, strict=True)), folder / "ema.safetensors")
    _end(accelerator)


Accelerator.prepare, Accelerator.backward, Accelerator.end_training = prepare, backward, end_training
