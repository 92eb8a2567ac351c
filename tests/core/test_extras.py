"""What a plain installation can do, and what the rest says: a table of commands and the extras that they need."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diffusers_lrlab.cli.main import COMMANDS
from diffusers_lrlab.core.extras import EXTRAS, MissingExtra, require_extra

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
GET = "import torch, diffusers_lrlab; o = torch.optim.AdamW([torch.zeros(1)], lr=1e-3); diffusers_lrlab."

# Commands that need an extra have something else that is wrong, so that they end soon where they have it.
NEEDS = {
    "lrlab list": None,
    "lrlab preview --lr_scheduler rex --lr_scheduler cosine --num_training_steps 10": None,
    "lrlab preview --timestep_sampler logit_normal --loss_weighting min_snr": None,
    "lrlab env": None,
    "lrlab audit -- true": None,
    "lrlab scale --learning_rate 1e-4": None,
    f"-m diffusers_lrlab.launch {SCRIPTS / 'own_script.py'} --lr_scheduler rex": None,
    f"-c '{GET}get_scheduler(\"rex\", o, 1, 10)'": None,
    f"-c '{GET}get_scheduler(\"reduce_lr_on_plateau\", o, 0, 10)'": None,
    f"-c '{GET}get_momentum_scheduler(\"demon\", o, num_training_steps=10)'": None,
    "-c 'import diffusers_lrlab as d; d.get_timestep_sampler(\"clts\", 1000, 10).sample(4, 0)'": None,
    '-c \'import diffusers_lrlab as d; [getattr(d, name) for name in ("MLPDenoiser", "PointDDPMPipeline")]\'': None,
    "lrlab preview --lr_scheduler rex --num_training_steps 10 --out curve.png": "train",
    "lrlab data export moons points --n 10 --n_test 0": "train",
    "lrlab plan --lr_scheduler cosin": "train",
    "lrlab schedule published --lr_scheduler rex": "train",
    "lrlab push nothing --repo_id user/name": "train",
    "lrlab pull user": "train",
    "lrlab rerun nothing": "train",
    "lrlab floor --dataset_name dino": "train",
    "lrlab check nothing": "train",
    "lrlab train --lr_scheduler cosin": "train",
    "lrlab find-lr --lr_scheduler cosin": "train",
    "lrlab completion bash": "train",
    "-m diffusers_lrlab.train --lr_scheduler cosin": "train",
    "train_ddpm.py --lr_scheduler cosin": "train",
    "find_lr.py --lr_scheduler cosin": "train",
    "-c 'from diffusers_lrlab import train'": "train",
    "-c 'from diffusers_lrlab import find_lr'": "train",
    "-c 'from diffusers_lrlab import TrainingConfig'": "train",
    "-c 'from diffusers_lrlab import load_toy_dataset as load; load(\"dino\", 10)'": "train",
    f"-c '{GET}get_scheduler(\"greedy\", o, 0, 10)'": "train",
    "lrlab study list": "study",
    "lrlab study run cosin --out study": "study",
    "run_study.py cosin --out study": "study",
    "-c 'from diffusers_lrlab import run_study'": "study",
    "-c 'from diffusers_lrlab import read_study'": "study",
    "-c 'from diffusers_lrlab.study.spec.reading import load_spec'": "study",
}


def outcomes(hidden, cwd):
    """From each command to its exit status and stderr in a process without these packages."""
    command = [sys.executable, "-W", "ignore", SCRIPTS / "without_packages.py", ",".join(hidden)]
    done = subprocess.run(command, cwd=cwd, input=json.dumps([*NEEDS]), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(NEEDS, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [("train", "study"), ("study",)], ids=" and ".join)
def test_a_missing_package_is_named_with_its_extra(hidden, tmp_path):
    # peft needs packages of train, so it is nowhere without them.
    packages = [package for extra in (*hidden, "lora") for package in EXTRAS[extra]]
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
    assert named | {"upstream-patch"} == {*COMMANDS}


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed_as = {"data_morph": "data-morph-ai", "sklearn": "scikit-learn"}
    for extra, packages in EXTRAS.items():
        declared = {re.match(r"[\w-]+", line)[0].lower() for line in project["optional-dependencies"][extra]}
        assert {installed_as.get(package, package) for package in packages} <= declared


def test_what_is_there_is_not_missed():
    require_extra("train", "This", ["json"])
    with pytest.raises(MissingExtra, match=r"This needs no_such_package, not installed here\..*lrlab\[study\]"):
        require_extra("study", "This", ["json", "no_such_package"])
    assert issubclass(MissingExtra, ImportError)
