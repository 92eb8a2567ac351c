"""Trackers: what they are started with, the names of what they are shown, and what is said of those that cannot be."""

import json
import sys

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from small_studies import ONE, study, without_report

from diffusers_lrlab import LabError, TrainingConfig, train
from diffusers_lrlab.training.resolve import resolve_config

SMALL = {"max_train_steps": 4, "train_batch_size": 8, "num_validation_images": 16, "ddpm_num_steps": 10}
SMALL |= {"num_inference_steps": 2, "lr_warmup_steps": 0, "denoiser": "mlp:hidden_size=16,num_layers=1,embedding_size=8"}


@pytest.fixture(autouse=True)
def accelerate_begins_anew():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def shown(monkeypatch):
    """What two trackers are shown, in order; one of them takes pictures."""
    shown = []

    class Numbers(GeneralTracker):
        name = "numbers"
        requires_logging_directory = False
        tracker = None

        def __init__(self, project):
            super().__init__()
            self.project = project

        def store_init_configuration(self, values):
            shown.append((self.name, "start", self.project, values))

        def log(self, values, step=None):
            shown.append((self.name, "log", step, values))

        def finish(self):
            shown.append((self.name, "finish", None, None))

    class Pictures(Numbers):
        name = "pictures"
        requires_logging_directory = True

        def __init__(self, project, logging_dir):
            super().__init__(project)
            self.logging_dir = logging_dir

        def log_images(self, values, step=None):
            shown.append((self.name, "images", step, values))

    for each in (Numbers, Pictures):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, each.name, each)
    return shown


def of(shown, tracker, event):
    return [(step, values) for name, what, step, values in shown if (name, what) == (tracker, event)]


def test_several_trackers_are_shown_a_run(tmp_path, shown):
    run = tmp_path / "run"
    options = {"eval_batch_size": 20, "distance_samples": 16, "logging_steps": 2, "validation_steps": 4, "preflight": False}
    train(TrainingConfig(**SMALL, **options, dataset_name="dino", logger="numbers,pictures, numbers", output_dir=run))
    for name in ("numbers", "pictures"):
        ((project, values),) = of(shown, name, "start")
        assert project == "diffusers_lrlab"
        assert values["max_train_steps"] == 4
        logged = of(shown, name, "log")
        assert [step for step, values in logged if {"train/loss", "train/lr", "train/grad_norm"} <= {*values}] == [2, 4]
        assert [step for step, values in logged if {"validation/loss", "validation/loss_ema"} <= {*values}] == [4]
        assert "results/energy_distance" in logged[-1][1]
        assert len(of(shown, name, "finish")) == 1
    assert not of(shown, "numbers", "images")
    pictures = {name: picture for _, values in of(shown, "pictures", "images") for name, picture in values.items()}
    assert set(pictures) == {"plots/loss", "plots/lr", "plots/timesteps", "plots/samples"}
    assert all(picture.dtype == np.uint8 and picture.shape[3] == 3 for picture in pictures.values())


@pytest.mark.slow
def test_the_runs_of_a_study_are_a_group(tmp_path, shown):
    with without_report():
        base = {**SMALL, "distance_samples": 16, "logger": "numbers"}
        study(tmp_path, tmp_path / "out", "--executor=stacked", **ONE, base=base)
    starts = [values for _, values in of(shown, "numbers", "start")]
    about = sorted((values["arm"], values["dataset"], values["seed"]) for values in starts)
    assert about == [("constant", "dino", 0), ("cosine", "dino", 0)]
    assert len(of(shown, "numbers", "finish")) == 2
    steps = [step for step, _ in of(shown, "numbers", "log")]
    assert steps == 2 * sorted(steps[: len(steps) // 2])
    logged = {name for _, values in of(shown, "numbers", "log") for name in values}
    assert {"train/loss", "train/lr", "validation/loss_ema", "results/energy_distance"} <= logged


def test_a_tracker_that_fails_to_start_fails_the_run(tmp_path, shown, monkeypatch):
    def refuse(tracker, *_):
        raise ConnectionError("no such host")

    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["numbers"], "start", refuse)
    options = {**SMALL, "dataset_name": "dino", "eval_batch_size": 4, "distance_samples": 0, "preflight": False}
    with pytest.raises(
        LabError, match="The tracker 'numbers' failed at .*: ConnectionError: no such host. Hint: fix that, or"
    ) as error:
        train(TrainingConfig(**options, logger="numbers", output_dir=tmp_path / "run"))
    record = json.loads((tmp_path / "run/lrlab/run.json").read_text())
    assert (record["run"]["status"], record["run"]["error"]) == (
        "failed",
        f"LabError: {error.value}".replace("of logger", "of --logger"),
    )


@pytest.mark.parametrize(
    ("logger", "words"),
    [
        ("tensorbord", ["--logger 'tensorbord': must be", "Did you mean 'tensorboard'?", "trackio, wandb"]),
        ("tensorboard,none", ["must be 'none', or trackers of accelerate", "'none' is not one of them"]),
        ("tensorboard,comet_ml", ["'comet_ml' is not installed: pip install comet_ml"]),
    ],
)
def test_trackers_that_cannot_be(logger, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(LabError) as error:
        resolve_config(TrainingConfig(logger=logger))
    assert all(word in str(error.value) for word in words), error.value
