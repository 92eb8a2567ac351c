"""`lrlab check`: what is damaged is named, and nothing is changed."""

import json
import shutil
from pathlib import Path

import pytest
from lrlab_command import said

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.files import locked
from diffusers_lrlab.core.manifest import open_manifest
from diffusers_lrlab.training.run_folder import RunFolder

FIXTURE = Path(__file__).parents[1] / "compatibility" / "v0.1.0"


def copy_of_run(path):
    """A finished run on points with two checkpoints."""
    return shutil.copytree(FIXTURE / "run", path)


def check(capsys, *arguments):
    return said(capsys, "check", *arguments)


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def say_running(path):
    record = json.loads(path.read_text())
    record["run"]["status"] = "running"
    path.write_text(json.dumps(record))


def test_a_whole_run(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = check(capsys, run)
    assert (status, "a run, finished after 40 of 40 updates" in said, "to go on" in said) == (0, True, False)
    for whole in ("lrlab/run.json", "checkpoint-20", "checkpoint-40"):
        assert f"whole  {whole}\n" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    status, said = check(capsys, run, "--json")
    assert (status, json.loads(said)["is_whole"], json.loads(said)["damaged"]) == (0, True, [])


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_whole(tmp_path, capsys):
    """Every file of a run damaged in every way is in test_damage.py."""
    run = copy_of_run(tmp_path / "run")
    flip(run / "checkpoint-40/denoiser/diffusion_pytorch_model.safetensors")
    status, said = check(capsys, run)
    assert (status, "SHA-256" in said) == (1, True), said
    command = "repeat the command that made it, with --resume_from_checkpoint latest, which continues from checkpoint-20;"
    assert command in said
    assert RunFolder(run).newest_checkpoint().name == "checkpoint-20"


def test_a_run_that_is_killed_or_goes_on(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    say_running(run / "lrlab" / "run.json")
    open_manifest(run)
    with locked(run, "--output_dir"):
        assert "a run, being written by another process" in check(capsys, run)[1]
    status, said = check(capsys, run)
    assert (status, "a run, killed after 40 of 40 updates" in said) == (0, True)


def test_a_data_set(tmp_path, capsys):
    folder = tmp_path / "points"
    assert main(["data", "export", "dino", str(folder), "--n", "20", "--n_test", "0"]) == 0
    capsys.readouterr()
    assert check(capsys, folder)[0] == 0
    flip(next((folder / "data").iterdir()), 40)
    status, said = check(capsys, folder)
    assert (status, "data/train-00000-of-00001.parquet" in said, "make it again" in said) == (1, True, True)


@pytest.mark.parametrize("name", ["", "nothing"])
def test_what_is_no_result(tmp_path, capsys, name):
    status, said = check(capsys, tmp_path / name)
    assert (status, "is not the folder of a run" in said) == (2, True)
