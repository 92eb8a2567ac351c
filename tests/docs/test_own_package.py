"""The package that docs/tutorials/own-package.md prints is installed for real, and its names are known everywhere."""

import json
import os
import subprocess
import sys

import printed
import pytest
import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables with which Python finds the installed package."""
    source, site = tmp_path_factory.mktemp("lab-extras"), tmp_path_factory.mktemp("site")
    (toml,) = printed.blocks("toml")
    (source / "pyproject.toml").write_text(toml.code)
    (source / "lab_extras.py").write_text(printed.block_with("def sawtooth", "python").code)
    # Neither an index nor another package is asked for.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    known = runs.environment()
    return {**known, "PYTHONPATH": os.pathsep.join(filter(None, [str(site), known.get("PYTHONPATH")]))}


def run(environment, *words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_knows_its_names(environment):
    names = {"schedulers": "sawtooth", "timesteps": "from_noise"}
    for kind, name in names.items():
        listed = json.loads(run(environment, "-m", "diffusers_lrlab", "list", kind, "--json"))[kind]
        (entry,) = [entry for entry in listed if entry["name"] == name]
        assert entry["source"] == "an example"
    curve = ["--lr_scheduler", "sawtooth:teeth=3", "--num_training_steps", "30", "--json"]
    drawn = run(environment, "-m", "diffusers_lrlab", "preview", *curve)
    assert "sawtooth" in drawn
    moving = ["--timestep_sampler", "from_noise", "--num_training_steps", "30", "--json"]
    density = run(environment, "-m", "diffusers_lrlab", "preview", *moving)
    assert "from_noise" in density


def test_the_launcher_and_scripts_know_its_names(environment):
    script = printed.ROOT / "tests/scripts/own_script.py"
    run(environment, "-m", "diffusers_lrlab.launch", script, "--lr_scheduler", "sawtooth:teeth=3")


def test_a_run_records_its_version(environment, tmp_path):
    small = ["--dataset_name=dino", "--max_train_steps=4", "--train_batch_size=8", "--num_validation_images=16"]
    small += ["--ddpm_num_steps=10", "--num_inference_steps=2", "--distance_samples=0", "--no_preflight"]
    names = ["--lr_scheduler=sawtooth", "--timestep_sampler=from_noise", f"--output_dir={tmp_path}/run"]
    run(environment, "-m", "diffusers_lrlab", "train", *small, *names)
    record = runs.read_record(tmp_path / "run")
    assert record["meta"]["versions"]["lab-extras"] == "0.1"
    assert record["config"]["lr_scheduler_kwargs"]["teeth"] == 4
