"""`lrlab floor`: of a data set, and beside the losses of a run."""

import json
import math
import re

import numpy as np
import pytest
import runs
import torch

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.diagnostics.plot import floor_in_words
from diffusers_lrlab.diagnostics.timestep_log import read_timesteps
from diffusers_lrlab.evaluation.floor_of_data import Floor

TINY = ["--ddpm_num_steps=20", "--num_validation_images=400", "--no_evaluation", "--max_train_steps=20", "--cpu_threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on points whose density is known."""
    folder = tmp_path_factory.mktemp("floor") / "rings"
    assert main(["train", "--dataset_name=rings", f"--output_dir={folder}", *TINY]) == 0
    return folder


def floor_of(capsys, *arguments):
    capsys.readouterr()
    assert main(["floor", "--json", "--max_images=800", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.pictures
def test_losses_of_a_run_are_above_the_floor(folder, capsys, tmp_path):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    state = torch.get_rng_state()
    found = floor_of(capsys, f"--run={folder}", f"--out={tmp_path / 'floor.png'}")
    assert torch.equal(torch.get_rng_state(), state)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert (tmp_path / "floor.png").stat().st_size > 10_000
    assert found["num_images"] == 800
    assert found["num_in_set"] == 100_000
    assert found["first_timesteps"] == list(range(0, 20, 2))
    assert found["memorised_bins"] == []
    middle = slice(2, 8)  # where the grid resolves the noise
    exact, losses = np.array(found["exact"][middle]), np.array(found["validation"][middle])
    assert (np.array(found["of_set"][middle]) < 1.05 * exact).all()
    assert (exact < 1.05 * np.array(found["upper_bound"][middle])).all()
    assert (losses > 0.9 * exact).all()  # of 40 points a bin, after 20 updates
    assert main(["floor", f"--run={folder}", "--max_images=100"]) == 0
    text = capsys.readouterr().out
    assert "lowest loss on 100 of 100,000 training examples" in text
    assert "is noise that no model predicts" in text


@pytest.mark.slow
def test_the_floor_with_labels_is_below_that_without(capsys):
    """What is known of the class is not left to guess."""
    base = ["--dataset_name=digits", "--objective=flow_matching"]
    without, labelled = floor_of(capsys, *base), floor_of(capsys, *base, "--label_column=label")
    assert without["exact"] is labelled["exact"] is None
    late = slice(6, 10)
    assert (np.array(labelled["of_set"][late]) < 0.97 * np.array(without["of_set"][late])).all()
    assert labelled["training"] is None


@pytest.mark.slow
def test_mirrored_images_count(capsys):
    once, mirrored = (floor_of(capsys, "--dataset_name=digits", *more) for more in ([], ["--random_flip"]))
    assert sum(mirrored["of_set"]) > 1.02 * sum(once["of_set"])


def made_floor(training):
    numbers = np.array([0.01, 0.5])
    return Floor(
        "made", 64, 64, np.array([0, 10, 20]), numbers, numbers / 100, numbers, np.array([0.4, 0.51]), None, training
    )


def test_memorisation_is_found_where_the_bounds_part():
    assert made_floor(np.array([0.05, 0.5])).memorised().tolist() == [True, False]
    assert made_floor(np.array([0.2, 0.6])).memorised().tolist() == [False, False]
    assert made_floor(np.array([math.nan, 0.5])).memorised().tolist() == [False, False]
    text = made_floor(np.array([0.05, 0.5])).describe()
    assert (
        "Memorisation at timesteps 0 to 9: the training loss, 0.05, is near the lowest on the 64 training examples" in text
    )
    assert "timesteps 10 to 19:" not in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--run", "nowhere"], "nowhere"),
        (["--max_images", "2"], "--max_images 2"),
        (["--dataset_name", "dinos"], "dinos"),
        (["--dataset_name", "digits", "--num_validation_images", "0"], "Hint: set --num_validation_images."),
    ],
)
def test_wrong_input(arguments, wanted, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["floor", *arguments]) == 2
    assert wanted in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_options_beside_a_run_are_refused(folder, capsys):
    assert main(["floor", f"--run={folder}", "--objective=flow_matching"]) == 2
    assert "has no effect with --run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_losses_by_timestep_is_refused(capsys, tmp_path):
    assert main(["train", "--dataset_name=rings", f"--output_dir={tmp_path / 'run'}", "--log_timestep_bins=0", *TINY]) == 0
    assert main(["floor", f"--run={tmp_path / 'run'}"]) == 2
    assert "--log_timestep_bins" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_logs_its_floor_once(tmp_path, capsys, monkeypatch):
    """It is that of `lrlab floor`, is told before, stays in the log of a resumed run, and changes nothing else."""
    monkeypatch.setattr("diffusers_lrlab.evaluation.floor_of_data._QUERIES", 50)
    asked = [*runs.tiny_arguments(tmp_path), "--log_timestep_bins=2", "--checkpointing_steps=2", "--max_train_steps=2"]
    asked += ["--num_validation_images=20", "--no_preflight"]
    first = [*asked, f"--output_dir={tmp_path / 'run'}", "--log_loss_floor"]
    assert main(["train", *first, "--dry_run"]) == 0
    assert re.search(r"of it .* s for the floor of the loss, before training", capsys.readouterr().out)
    assert main(["train", *first]) == 0
    assert main(["train", *first, "--resume_from_checkpoint=latest"]) == 0
    frame = read_timesteps(tmp_path / "run" / "lrlab" / "timesteps.parquet").to_pandas()
    logged = frame.dropna(subset="loss_floor")
    assert (logged["update"].tolist(), logged["bin"].tolist()) == ([0, 0], [0, 1])
    capsys.readouterr()
    assert main(["floor", "--json", f"--run={tmp_path / 'run'}"]) == 0
    assert logged["loss_floor"].tolist() == json.loads(capsys.readouterr().out)["of_set"]
    assert main(["train", *asked, f"--output_dir={tmp_path / 'other'}"]) == 0
    assert runs.read_metrics(tmp_path / "other") == runs.read_metrics(tmp_path / "run")


def test_a_floor_that_cannot_be_told_is_refused_before_training(tmp_path, capsys):
    asked = ["train", *TINY, "--dataset_name=digits", f"--output_dir={tmp_path / 'run'}", "--log_loss_floor"]
    assert main([*asked, "--in_memory_limit_mb=0"]) == 2
    assert "--log_loss_floor True: must be left out for data that are not in memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*asked, "--log_timestep_bins=0"]) == 2
    assert "--log_loss_floor has no effect without --log_timestep_bins above 0" in capsys.readouterr().err


def test_the_plot_says_how_much_is_noise():
    assert floor_in_words(0.6931, 0.6601) == "of the loss of 0.693, 0.66 is noise that nobody can predict"
    assert floor_in_words(0.65, 0.6601) == "the loss of 0.65 is below the floor of 0.66"
