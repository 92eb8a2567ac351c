"""Trainers that pip installs, each training for 20 updates by its own loop: under the audit, and with another schedule.

pip install lightning denoising-diffusion-pytorch diffsynth && python -m pytest -m weekly tests/pip_trainers
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffusers_lrlab import lr_curve

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "trainer-and-lightning.md"
NUM_UPDATES, WARMUP, LR = 20, 2, 1e-3
WSD = "wsd:num_decay_steps=0.3,decay_type=1-sqrt"
# Beside a torch without CUDA, the torchvision of the package index lacks operators that it needs at import.
TORCHVISION = """
try:
    import torchvision
except ImportError:
    pass
except RuntimeError:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
DENOISING_DIFFUSION = """
import numpy as np
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
from pathlib import Path
from PIL import Image

if __name__ == "__main__":
    Path("images").mkdir(exist_ok=True)
    for number in range(100):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(f"images/{number}.png")
    diffusion = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=8, timesteps=10)
    short = {"train_lr": 1e-3, "train_num_steps": 20, "calculate_fid": False}
    Trainer(diffusion, "images", train_batch_size=8, gradient_accumulate_every=2, **short).train()
"""
DIFFSYNTH = """
import torch
from accelerate import Accelerator
from diffsynth.diffusion import DiffusionTrainingModule, FlowMatchScheduler, ModelLogger, launch_training_task

class Images(torch.utils.data.Dataset):
    load_from_cache = False

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((1, 1, 8, 8), index / 40)

class Module(DiffusionTrainingModule):
    def __init__(self):
        super().__init__()
        self.scheduler = FlowMatchScheduler()
        self.scheduler.set_timesteps(1000, training=True)
        self.unet = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, images):
        noise, timestep = torch.randn_like(images), self.scheduler.timesteps[torch.randint(0, 1000, (1,))]
        noisy = self.scheduler.add_noise(images, noise, timestep)
        return torch.nn.functional.mse_loss(self.unet(noisy), self.scheduler.training_target(images, noise, timestep))

if __name__ == "__main__":
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    launch_training_task(accelerator, Images(), Module(), ModelLogger("out"), learning_rate=1e-3, num_workers=0)
"""


def printed(package):
    """The program of the page that imports this package, made short."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if re.search(rf"^(from|import) {package}\b", block, re.MULTILINE))
    for long, short in {"max_steps=100": "max_steps=20", "warmup_steps=10": "warmup_steps=2"}.items():
        assert long in code
        code = code.replace(long, short)
    return code


# The program, and the rates of the trainer's own schedule; that of DiffSynth-Studio runs 5 steps at a third of the rate.
TRAINERS = {
    "transformers": (lambda: printed("transformers"), lr_curve(WSD, LR, WARMUP, NUM_UPDATES)),
    "lightning": (lambda: printed("lightning"), lr_curve(WSD, LR, WARMUP, NUM_UPDATES)),
    "denoising_diffusion_pytorch": (lambda: DENOISING_DIFFUSION, np.full(NUM_UPDATES, LR)),
    "diffsynth": (lambda: DIFFSYNTH, np.repeat([LR / 3, LR], [5, NUM_UPDATES - 5])),
}


def audited(folder, *program, options=()):
    """What `lr_audit.json` says of the one optimizer of a program that ends well, and what it says of all."""
    audit = [sys.executable, "-m", "diffusers_lrlab.cli.main", "audit", *options, "--", sys.executable, *program]
    done = subprocess.run(audit, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    audit = json.loads((folder / "lr_audit.json").read_text())
    (optimizer,) = audit["optimizers"]
    assert (optimizer["num_updates"], set(optimizer["backward_passes"])) == (NUM_UPDATES, {2})
    return audit, [np.array(group["lr"]) for group in optimizer["groups"]]


@pytest.mark.weekly
@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer_runs_its_schedule_and_one_that_replaces_it(package, tmp_path, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    make, own = TRAINERS[package]
    (tmp_path / "train.py").write_text(TORCHVISION + make())
    for lrs in audited(tmp_path, "train.py")[1]:
        np.testing.assert_allclose(lrs, own, rtol=1e-12, atol=1e-18)
    spec = "rex:d=0.9"
    launcher = ["-m", "diffusers_lrlab.launch", "--lr_scheduler", spec, "--num_warmup_steps", str(WARMUP)]
    launcher += ["--num_updates", str(NUM_UPDATES), "--strict_lr_audit", "train.py"]
    audit, groups = audited(tmp_path, *launcher, options=["--expect", spec, "--num_warmup_steps", str(WARMUP)])
    assert audit["as_expected"] is True
    for lrs in groups:
        np.testing.assert_allclose(lrs, lr_curve(spec, LR, WARMUP, NUM_UPDATES), rtol=1e-12, atol=1e-18)
