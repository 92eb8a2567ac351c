"""The package that docs/tutorials/own-package.md prints is installed for real, and its names are known everywhere."""

import json
import os
import subprocess
import sys

import printed
import pytest
import runs


@pytest.fixture
def run(tmp_path):
    """Runs Python where the package is installed; returns what it prints."""
    source, site = tmp_path / "lab-extras", tmp_path / "site"
    source.mkdir()
    (toml,) = printed.blocks("toml")
    (source / "pyproject.toml").write_text(toml.code)
    (source / "lab_extras.py").write_text(printed.block_with("def sawtooth", "python").code)
    # Neither an index nor another package is asked for.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))

    def run(*words):
        environment = {**runs.environment(), "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_every_command_knows_its_names_and_a_run_records_its_version(run, tmp_path):
    listed = json.loads(run("-m", "diffusers_lrlab", "list", "--json"))
    for kind, name in {"schedulers": "sawtooth", "timesteps": "from_noise"}.items():
        assert [entry["source"] for entry in listed[kind] if entry["name"] == name] == ["an example"]
    run("-m", "diffusers_lrlab.launch", printed.ROOT / "tests/scripts/own_script.py", "--lr_scheduler", "sawtooth:teeth=3")
    small = ["--dataset_name=dino", "--max_train_steps=4", "--train_batch_size=8", "--num_validation_images=16"]
    small += ["--ddpm_num_steps=10", "--num_inference_steps=2", "--distance_samples=0", "--no_preflight"]
    names = ["--lr_scheduler=sawtooth", "--timestep_sampler=from_noise", f"--output_dir={tmp_path}/run"]
    run("-m", "diffusers_lrlab", "train", *small, *names)
    record = runs.read_record(tmp_path / "run")
    assert record["meta"]["versions"]["lab-extras"] == "0.1"
    assert record["config"]["lr_scheduler_kwargs"]["teeth"] == 4
