"""`lrlab check`: what is damaged is named, and nothing is changed."""

import json
import shutil
from pathlib import Path

import pytest

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.files import locked
from diffusers_lrlab.core.manifest import open_manifest
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
    assert (status, "a run, finished after 40 of 40 updates" in said, "to go on" in said) == (0, True, False)
    for whole in ("lrlab/run.json", "log", "checkpoint-20", "checkpoint-40", "pipeline"):
        assert f"whole  {whole}\n" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    status, said = check(capsys, run, "--json")
    assert (status, json.loads(said)["is_whole"], json.loads(said)["damaged"]) == (0, True, [])


# What is done to which file, and what is said of it.
DAMAGE = {
    "a bit of weights": (flip, "checkpoint-40/denoiser/diffusion_pytorch_model.safetensors", "SHA-256"),
    "a lost manifest": (Path.unlink, "checkpoint-40/manifest.json", "manifest.json' is missing"),
    "half a record": (halve, "lrlab/run.json", "cannot be read as JSON"),
    "half a log": (halve, "lrlab/metrics.jsonl", "bytes instead of"),
    "no weights": (lambda path: shutil.rmtree(path), "denoiser", "pipeline: "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_a_run_is_named(tmp_path, capsys, name):
    damage, file, said_of_it = DAMAGE[name]
    run = copy_of_run(tmp_path / "run")
    damage(run / file)
    status, said = check(capsys, run)
    newest = "checkpoint-20" if "checkpoint" in file else "checkpoint-40"
    assert (status, said_of_it in said) == (1, True), said
    assert f"repeat the command that made it, with --resume_from_checkpoint latest, which continues from {newest};" in said
    assert RunFolder(run).newest_checkpoint().name == newest


def test_a_run_that_is_killed_or_goes_on(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    say_running(run / "lrlab" / "run.json")
    open_manifest(run)
    with locked(run, "--output_dir"):
        assert "a run, being written by another process" in check(capsys, run)[1]
    status, said = check(capsys, run)
    assert (status, "a run, killed after 40 of 40 updates" in said) == (0, True)


def test_a_study(tmp_path, capsys):
    study = shutil.copytree(FIXTURE / "study", tmp_path / "study")
    assert check(capsys, study)[0] == 0
    result, *_ = sorted((study / "runs").glob("*.json"))
    weights = study / "weights" / f"{result.stem}.safetensors"
    halve(result)
    flip(weights)
    status, said = check(capsys, study)
    assert (status, f"damaged  '{result}' has" in said, f"damaged  '{weights}' is damaged" in said) == (1, True, True)
    assert "repeat the `lrlab study run` command" in said


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
    assert (status, "holds no run" in said or "is not a folder" in said) == (2, True)
