"""`lrlab check`: what is damaged is named, and what is put aside is no longer in the way."""

import json
import shutil
from pathlib import Path

import pytest

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.lock import locked
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.training.run_folder import RunFolder

FIXTURE = Path(__file__).parents[1] / "compatibility" / "v0.1.0"


def copy_of_run(path):
    """A finished run on points with two checkpoints."""
    return shutil.copytree(FIXTURE / "run", path)


def check(capsys, *arguments):
    """Exit status and what is said."""
    status = main(["check", *map(str, arguments)])
    out, error = capsys.readouterr()
    assert "Traceback" not in error
    return status, out + error


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def say_running(path):
    record = json.loads(path.read_text())
    record["run"]["status"] = "running"
    path.write_text(json.dumps(record))


def test_a_whole_run(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = check(capsys, run)
    assert status == 0
    for whole in ("record", "log", "checkpoint-20", "checkpoint-40", "pipeline"):
        assert f"whole  {whole}" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    status, said = check(capsys, run, "--json")
    assert (status, json.loads(said)["is_whole"], json.loads(said)["damaged"]) == (0, True, [])


# What is done to which file, what is said of it, and what is left of it by --repair.
DAMAGE = {
    "a bit of weights": (
        flip,
        "checkpoint-40/denoiser/diffusion_pytorch_model.safetensors",
        "SHA-256",
        "damaged-checkpoint-40",
    ),
    "half a state": (halve, "checkpoint-40/optimizer.bin", "bytes instead of", "damaged-checkpoint-40"),
    "a lost file": (Path.unlink, "checkpoint-40/trainer.json", "is missing", "damaged-checkpoint-40"),
    "a lost manifest": (Path.unlink, "checkpoint-40/manifest.json", "manifest.json' is missing", "damaged-checkpoint-40"),
    "half a record": (halve, "lrlab/run.json", "cannot be read as JSON", "lrlab/run.json.damaged"),
    "half the weights": (halve, "denoiser/diffusion_pytorch_model.safetensors", "pipeline: ", "model_index.json.damaged"),
    "no weights": (lambda path: shutil.rmtree(path), "denoiser", "pipeline: ", "model_index.json.damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_a_run_is_named_and_put_aside(tmp_path, capsys, name):
    damage, file, said_of_it, left = DAMAGE[name]
    run = copy_of_run(tmp_path / "run")
    damage(run / file)
    status, said = check(capsys, run)
    assert status == 1
    assert said_of_it in said
    assert "continues from checkpoint-20" in said or "40" not in file
    assert "--repair" in said
    status, said = check(capsys, run, "--repair")
    assert f"was renamed to {Path(left).name}" in said
    assert (run / left).exists()
    assert RunFolder(run).newest_checkpoint().name == ("checkpoint-20" if "40" in file else "checkpoint-40")
    if "lrlab" not in left:  # a run without a record is not whole
        assert status == 0, said


def test_a_log_that_lost_rows(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    halve(run / "lrlab" / "metrics.jsonl")
    assert check(capsys, run)[0] == 1
    _, said = check(capsys, run, "--repair")
    assert "metrics.jsonl was cut back to checkpoint-40" in said
    assert RunFolder(run).read_metrics()


def test_what_a_killed_run_left(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    (run / ".tmp-lrlab-7-x").write_text("")
    say_running(run / "lrlab" / "run.json")
    status, said = check(capsys, run)
    assert (status, "killed after 40 of 40" in said, ".tmp-lrlab-7-x" in said) == (0, True, True)
    status, said = check(capsys, run, "--repair")
    assert (status, "failed after 40 of 40" in said) == (0, True)
    assert not (run / ".tmp-lrlab-7-x").exists()


def test_a_run_that_goes_on_is_not_repaired(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    with locked(run, "--output_dir"):
        assert "being written by process" in check(capsys, run)[1]
        status, said = check(capsys, run, "--repair")
    assert (status, "is being written by process" in said) == (2, True)


def test_a_study(tmp_path, capsys):
    study = tmp_path / "study"
    shutil.copytree(FIXTURE / "study", study)
    assert check(capsys, study)[0] == 0
    first, *_ = sorted((study / "runs").glob("*.json"))
    halve(first)
    status, said = check(capsys, study)
    assert (status, first.name in said, "lrlab study run" in said) == (1, True, True)
    status, said = check(capsys, study, "--repair")
    assert (status, f"{first.name}.damaged" in said) == (0, True)


@pytest.mark.parametrize("change", [flip, Path.unlink])
def test_weights_of_a_study_are_held_against_their_hashes(tmp_path, capsys, change):
    study = StudyFolder(shutil.copytree(FIXTURE / "study", tmp_path / "study"))
    first, *_ = sorted((study.path / "runs").glob("*.json"))
    weights = study.weights_file(first.stem)
    assert check(capsys, study.path)[0] == 0
    change(weights)
    status, said = check(capsys, study.path)
    assert (status, f"damaged  weights/{weights.name}" in said) == (1, True)
    _, said = check(capsys, study.path, "--repair")
    assert (not weights.exists(), f"{weights.name}.damaged" in said) == (True, change is flip)


def test_a_data_set(tmp_path, capsys):
    folder = tmp_path / "points"
    assert main(["data", "export", "dino", str(folder), "--n", "20", "--n_test", "0"]) == 0
    capsys.readouterr()
    assert check(capsys, folder)[0] == 0
    flip(next((folder / "data").iterdir()), 40)
    status, said = check(capsys, folder)
    assert (status, "data/train-00000-of-00001.parquet" in said) == (1, True)
    status, said = check(capsys, folder, "--repair")
    assert (status, "Make or download it again" in said) == (2, True)


@pytest.mark.parametrize("name", ["", "nothing"])
def test_what_is_no_result(tmp_path, capsys, name):
    status, said = check(capsys, tmp_path / name)
    assert (status, "holds no run" in said or "is not a folder" in said) == (2, True)
