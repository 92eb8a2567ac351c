"""What a plain installation can do, and what the rest says: a table of commands and the extras that they need."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch

from diffusers_lrlab import get_optimizer, get_scheduler
from diffusers_lrlab.cli.main import COMMANDS
from diffusers_lrlab.core import environment
from diffusers_lrlab.core.environment import EXTRAS, ON_PYPI, MissingExtra, require_extra
from diffusers_lrlab.schedules import feedback

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
CORE = ("accelerate", "diffusers", "torch")  # which are always there
GET = "import torch, diffusers_lrlab; o = torch.optim.AdamW([torch.zeros(1)], lr=1e-3); diffusers_lrlab."

# Commands that need an extra have something else that is wrong, so that they end soon where they have it.
NEEDS = {
    "lrlab list": None,
    "lrlab preview --lr_scheduler rex --lr_scheduler cosine --num_training_steps 10": None,
    "lrlab preview --timestep_sampler logit_normal --loss_weighting min_snr": None,
    "lrlab audit -- true": None,
    f"-m diffusers_lrlab.launch {SCRIPTS / 'own_script.py'} --lr_scheduler rex": None,
    f"-c '{GET}get_scheduler(\"rex\", o, 1, 10)'": None,
    "-c 'import diffusers_lrlab as d; d.get_timestep_sampler(\"clts\", 1000, 10).sample(4, 0)'": None,
    '-c \'import diffusers_lrlab as d; [getattr(d, name) for name in ("MLPDenoiser", "PointDDPMPipeline")]\'': None,
    "lrlab preview --lr_scheduler rex --num_training_steps 10 --out curve.png": "plots",
    f"-m diffusers_lrlab.launch --log_timesteps {SCRIPTS / 'own_script.py'}": "plots",
    f"-m diffusers_lrlab.launch --find_lr {SCRIPTS / 'own_script.py'}": "train",
    "lrlab data export moons points --n 10 --n_test 0": "train",
    "lrlab plan --lr_scheduler cosin": "train",
    "lrlab push nothing --repo_id user/name": "train",
    "lrlab pull user": "train",
    "lrlab extend nothing --max_train_steps 10": "train",
    "lrlab ema nothing --sigma_rel 0.1 --out averaged": "train",
    "lrlab check nothing": "train",
    "lrlab train --lr_scheduler cosin": "train",
    "lrlab find-lr --lr_scheduler cosin": "train",
    "lrlab completion bash": "train",
    "-c 'from diffusers_lrlab import train'": "train",
    "-c 'from diffusers_lrlab import load_toy_dataset as load; load(\"dino\", 10)'": "train",
    "lrlab study list": "study",
    "lrlab study run cosin --out study": "study",
    "-c 'from diffusers_lrlab import run_study'": "study",
}


def outcomes(hidden, cwd):
    """From each command to its exit status and stderr in a process without these packages."""
    command = [sys.executable, "-W", "ignore", SCRIPTS / "without_packages.py", ",".join(hidden)]
    done = subprocess.run(command, cwd=cwd, input=json.dumps([*NEEDS]), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(NEEDS, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [("plots", "train", "study"), ("study",)], ids=" and ".join)
def test_a_missing_package_is_named_with_its_extra(hidden, tmp_path):
    # peft needs packages of train, so it is nowhere without them.
    packages = ["peft", *(package for extra in hidden for package in EXTRAS[extra] if package not in CORE)]
    for command, (status, stderr) in outcomes(packages, tmp_path).items():
        if NEEDS[command] in hidden:
            assert status in (1, 2), (command, stderr)
            assert re.fullmatch(r"error: .* needs .*not installed here.*", stderr.strip()), (command, stderr)
            assert f"pip install 'diffusers_lrlab[{NEEDS[command]}]'" in stderr, (command, stderr)
        elif NEEDS[command] is None:
            assert status == 0, (command, stderr)
        else:
            assert "diffusers_lrlab[" not in stderr, (command, stderr)


def test_every_command_is_in_the_table():
    named = {words[1] for command in NEEDS if (words := command.split())[0] == "lrlab"}
    assert named == {*COMMANDS}


def test_extras_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert {f"{ON_PYPI.get(package, package)}>={bound}" for package, bound in packages.items()} <= {*extras[extra]}


OLD = {"torch": "2.6.0+cu124", "diffusers": "0.32.1", "accelerate": "1.6.0"}


def test_training_names_what_is_missing_and_the_versions_that_are_too_old(monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda name: OLD.get(name, "99"))
    monkeypatch.setattr(environment, "_is_installed", lambda package: True)
    require_extra("plots", "Plotting", ["matplotlib"])  # which does not ask for those of training
    monkeypatch.setattr(environment, "_is_installed", lambda package: package not in ("datasets", "sklearn"))
    with pytest.raises(MissingExtra) as refused:
        require_extra("train", "Training")
    needs = (
        "Training needs datasets, sklearn, not installed here, accelerate 1.10 or later (1.6.0 is installed), "
        "diffusers 0.35 or later (0.32.1 is installed), torch 2.11 or later (2.6.0+cu124 is installed). "
    )
    assert isinstance(refused.value, ImportError)
    assert str(refused.value).startswith(needs)
    assert str(refused.value).endswith("an environment of its own: pip install 'diffusers_lrlab[train]'")


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda: get_scheduler("greedy", torch.optim.SGD([torch.zeros(1)]), 0, 9), "'greedy' needs transformers 5.4 or"),
        (lambda: get_optimizer("muon", [torch.zeros(2, 2)], 1e-3), "'muon' needs torch 2.9 or later (2.6.0 is"),
    ],
    ids=["greedy", "muon"],
)
def test_what_an_older_library_lacks_says_which_version_has_it(make, needs, monkeypatch):
    monkeypatch.setattr(feedback, "_greedy_class", feedback._greedy_class.__wrapped__)  # which an earlier test may have made
    monkeypatch.setattr(environment, "version_of", {"torch": "2.6.0", "transformers": "4.49.0"}.get)
    with pytest.raises(MissingExtra, match=re.escape(needs)) as refused:
        make()
    package = needs.split()[2]
    assert str(refused.value).endswith(f"pip install '{package}>={needs.split()[3]}'")
