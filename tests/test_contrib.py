"""The patches of contrib/diffusers: their schedules are those of this package, and the script's clock is mended."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from diffusers_lrlab import lr_curve
from diffusers_lrlab.core.spec import parse_spec
from diffusers_lrlab.diffusers_plugin.host.source import HostScript, find_faults
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.registries import COOLDOWNS
from diffusers_lrlab.schedules.schedule import resolve_schedule

CONTRIB = Path(__file__).parents[1] / "contrib" / "diffusers"
OPTIMIZATION = "src/diffusers/optimization.py"
SCRIPT = "examples/unconditional_image_generation/train_unconditional.py"
LR, BETAS = 3e-4, (0.95, 0.999)
LENGTHS = [(1, 0), (10, 0), (10, 3), (50, 49), (1000, 100)]
# From the arguments of the patched function to our spec string, for each patch.
SAME = {
    "rex": [({}, "rex"), ({"d": 0.9, "min_lr_ratio": 0.1}, "rex:d=0.9,min_lr_ratio=0.1")],
    "warmup_stable_decay": [
        ({}, "wsd"),
        *(
            ({"decay_type": form, "min_lr_ratio": floor}, f"wsd:decay_type={form},min_lr_ratio={floor}")
            for form in sorted(COOLDOWNS)
            for floor in (0.0, 0.05)
        ),
    ],
    "inverse_sqrt": [({}, "inverse_sqrt"), ({"timescale": 30}, "inverse_sqrt:timescale=30")],
    "cosine_with_min_lr": [
        ({}, "cosine_with_min_lr"),
        ({"min_lr_rate": 0.2, "num_cycles": 1.5}, "cosine_with_min_lr:min_lr_rate=0.2,num_cycles=1.5"),
        ({"min_lr": 1e-5}, "cosine_with_min_lr:min_lr=1e-5"),
    ],
    "demon": [({}, "demon"), ({"scale_lr": True}, "mdlrc")],
}


LAZY = ["lazy_dynamo", "lazy_models"]


def apply(patch, folder, only):
    """Applies a part of a patch below a folder, which is in no repository."""
    command = ["git", "apply", f"--include={only}", str(CONTRIB / f"{patch}.patch")]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=SAME)
def patched(request, tmp_path_factory):
    """The name of a patch, and the installed diffusers' `optimization.py` with it, as a module."""
    folder, name = tmp_path_factory.mktemp(request.param), f"diffusers.optimization_with_{request.param}"
    file = folder / OPTIMIZATION
    file.parent.mkdir(parents=True)
    shutil.copy(Path(diffusers.__file__).parent / "optimization.py", file)
    apply(request.param, folder, OPTIMIZATION)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield request.param, module
    del sys.modules[name]


def curves(module, name, warmup, length, kwargs):
    """Learning rate and beta1 at each update: float64 of shape `(length, 2)`."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR, betas=BETAS)
    scheduler = module.get_scheduler(name, optimizer, None, warmup, length, scheduler_specific_kwargs=kwargs)
    rows = []
    for _ in range(length):
        (group,) = optimizer.param_groups
        rows.append((group["lr"], group["betas"][0]))
        optimizer.step()
        scheduler.step()
    return np.array(rows)


def test_the_curves_of_a_patch_are_ours(patched):
    name, module = patched
    for kwargs, spec in SAME[name]:
        for length, warmup in LENGTHS:
            schedule = resolve_schedule(spec)
            lrs, momenta = schedule_curves(schedule, LR, BETAS[0], warmup, length)
            found = curves(module, name, warmup, length, kwargs)
            beta1, label = BETAS[0] if momenta is None else momenta, f"{spec}, {warmup} of {length}"
            np.testing.assert_allclose(found[:, 0], lrs, rtol=1e-12, atol=1e-12 * LR, err_msg=label)
            np.testing.assert_allclose(found[:, 1], np.broadcast_to(beta1, length), rtol=1e-12, atol=1e-12)


def test_diffusers_own_names_keep_their_curves_and_unknown_arguments_are_refused(patched):
    name, module = patched
    for known in ("linear", "cosine", "polynomial", "constant_with_warmup"):
        np.testing.assert_allclose(curves(module, known, 3, 10, None)[:, 0], lr_curve(known, LR, 3, 10), rtol=1e-12)
    for known in (name, "constant", "cosine_with_restarts"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
            curves(module, known, 3, 10, {"unknown": 1})


def test_each_patch_has_the_text_of_its_pull_request():
    patches = {path.stem for path in CONTRIB.glob("*.patch")}
    assert patches == {*SAME, *LAZY, "lr_clock"}
    for name in patches:
        text = (CONTRIB / f"{name}.md").read_text(encoding="utf-8")
        assert re.match(r"# \w", text)
        assert {line for line in text.splitlines() if line.startswith("## ")} >= {"## What does this PR do?"}
    for spec in (spec for rows in SAME.values() for _, spec in rows):
        parse_spec(spec)


IMPORTS = """
import sys
from diffusers import DDPMScheduler, ModelMixin
assert "torch._dynamo" not in sys.modules
from diffusers import UNet2DModel
assert not {"peft", "scipy", "diffusers.models.transformers.transformer_flux"} & set(sys.modules)
from diffusers.models import transformers, unets
from diffusers.models.transformers import transformer_flux
names = [(package, name) for package in (transformers, unets) for name in package.__all__]
assert len(names) > 100
for package, name in names:
    getattr(package, name)
"""


@pytest.mark.slow
def test_imports_are_lazy_with_the_patches(tmp_path):
    """In a copy of the installed diffusers."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(diffusers.__file__).parent, tmp_path / "src/diffusers", ignore=ignored)
    for patch in LAZY:
        apply(patch, tmp_path, "src/*")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("DIFFUSERS_CHECKOUT" not in os.environ, reason="DIFFUSERS_CHECKOUT names no checkout of diffusers")
def test_the_clock_of_the_script_is_right_with_the_patch(tmp_path):
    changed = re.findall(r"^\+\+\+ b/(.*)$", (CONTRIB / "lr_clock.patch").read_text(encoding="utf-8"), re.MULTILINE)
    for name in changed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(os.environ["DIFFUSERS_CHECKOUT"]) / name, tmp_path / name)

    def faults():
        return [name for name, _ in find_faults(HostScript(str(tmp_path / SCRIPT)))]

    assert faults() == ["LR: accumulation"]
    for name in changed:
        apply("lr_clock", tmp_path, name)
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")
    assert faults() == []
