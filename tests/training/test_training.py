"""The parts of a training run, with a model small enough to look into."""

import json
import math

import numpy as np
import pytest
import runs
import torch
from diffusers import DDPMScheduler
from tables import cases

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.held_out import ValidationLoss
from diffusers_lrlab.objective.processes import DDPM
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config


class Recorder(torch.nn.Module):
    """Predicts a constant image and remembers what it was shown."""

    def __init__(self, prediction):
        super().__init__()
        self.prediction = prediction

    def forward(self, noisy_images, timesteps):
        self.seen = noisy_images, timesteps
        return type("Output", (), {"sample": self.prediction.expand_as(noisy_images)})


@cases(
    ("data", "folder"),
    [
        ({}, "ddpm-digits-8"),
        ({"dataset_name": "user/flowers", "image_column": "image"}, "ddpm-flowers-64"),
        ({"train_data_dir": "faces"}, "ddpm-faces-64"),
    ],
)
def test_without_a_folder_a_run_goes_into_one_named_after_its_data(tmp_path, monkeypatch, data, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faces").mkdir()
    (tmp_path / "faces" / "a.png").touch()
    assert resolve_config(TrainingConfig(**data)).output_dir == folder


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_losses_against_the_definitions(prediction_type):
    scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type=prediction_type)
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 5, 1, 4, 4, generator=generator).unbind()
    prediction = torch.randn(1, 1, 4, 4, generator=generator)
    timesteps = torch.tensor([0, 1, 300, 700, 999])
    losses = DDPM(scheduler).losses(Recorder(prediction), Batch(images), noise, timesteps)

    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    alpha = torch.cumprod(1 - betas, 0)[timesteps].view(-1, 1, 1, 1)
    if prediction_type == "epsilon":
        expected = (prediction - noise) ** 2
    elif prediction_type == "sample":
        # The noise implied by a predicted image is wrong by sqrt(SNR) times the image's error.
        noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
        expected = ((noisy - alpha.sqrt() * prediction) / (1 - alpha).sqrt() - noise) ** 2
    else:
        expected = (prediction - (alpha.sqrt() * noise - (1 - alpha).sqrt() * images)) ** 2
    torch.testing.assert_close(losses.double(), expected.double().mean(dim=(1, 2, 3)), rtol=2e-4, atol=1e-7)


class TestValidationLoss:
    scheduler = DDPMScheduler(num_train_timesteps=100)
    images = torch.rand(10, 1, 4, 4) * 2 - 1

    def make(self, batch_size=4):
        return ValidationLoss(Batch(self.images), DDPM(self.scheduler), batch_size, torch.device("cpu"))

    def test_it_is_a_function_of_the_model(self):
        model = Recorder(torch.zeros(1)).train()
        state = torch.random.get_rng_state()
        first, second = self.make()(model), self.make(batch_size=3)(model)
        assert first.shape == (10,)
        assert first == pytest.approx(second, rel=1e-5)
        assert model.training
        assert torch.equal(torch.random.get_rng_state(), state)
        # Predicting no noise at all is wrong by the noise's variance.
        assert first.mean() == pytest.approx(1, abs=0.3)

    def test_timesteps_cover_the_range_evenly(self):
        assert sorted(self.make().timesteps.tolist()) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def train_tiny(folder, pictures=False, **options):
    # With dropout, so that whatever disturbs the global random state shows.
    small = {"output_dir": folder / "run", "max_train_steps": 4, "train_batch_size": 8}
    runs.run(*runs.tiny_arguments(folder, dropout=0.2, preflight=True, **small | options), pictures=pictures)
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small finished run that several tests look into."""
    more = {"validation_steps": 2, "checkpointing_steps": 2, "seed": 3, "save_images_epochs": 9}
    return train_tiny(tmp_path_factory.mktemp("finished"), pictures=True, **more)


@pytest.mark.slow
def test_the_folder_holds_what_the_readme_says(finished):
    weights = "diffusion_pytorch_model.safetensors"
    for name in (
        *("model_index.json", f"unet/{weights}", "scheduler/scheduler_config.json", "README.md"),
        *("lrlab/metrics.jsonl", "lrlab/run.json", "lrlab/timesteps.parquet", "lrlab/timesteps.png", "lrlab/loss.png"),
        *("lrlab/lr.png", "lrlab/samples.png", "lrlab/progress.png", "checkpoint-2/trainer.json"),
        *(f"checkpoint-2/unet/{weights}", f"checkpoint-2/unet_ema/{weights}"),
    ):
        assert (finished / name).stat().st_size > (100 if name.endswith(".png") else 0), name  # of 67, if blank
    assert not list(finished.rglob(".tmp-*"))


def test_the_record(finished):
    record = runs.read_record(finished)
    assert list(record) == ["run", "train", "config", "meta"]
    assert record["run"]["status"] == "finished"
    assert record["run"]["command"].startswith("accelerate launch training_scripts/train_ddpm.py ")
    assert record["config"]["seed"] == 3
    assert record["config"]["lr_scheduler_kwargs"]["num_cycles"] == 0.5
    assert 0 < record["train"]["training_seconds"] < record["run"]["seconds"]
    assert record["train"]["peak_memory_mb"] > 50
    assert record["meta"]["versions"]["torch"] == torch.__version__


def test_without_labels_nothing_is_said_of_them(finished):
    assert json.loads((finished / "model_index.json").read_text())["_class_name"] == "DDPMPipeline"
    assert not (finished / "pipeline.py").exists()
    record, card = runs.read_record(finished), (finished / "README.md").read_text()
    assert "class_names" not in record["train"]
    assert not {name for name in record["train"]["results"] if "class" in name}
    assert "Label dropout" not in card
    assert "unconditional-image-generation" in card


def test_the_log(finished):
    updates, validations = runs.read_metrics(finished)
    assert [row["update"] for row in updates] == [0, 1, 2, 3]
    assert [row["update"] for row in validations] == [2, 4]
    assert all(math.isfinite(value) for row in updates + validations for value in row.values())
    assert updates[0]["beta1"] == 0.95
    # A fresh model predicts about nothing, which is wrong by the noise's variance; the norm is that before clipping.
    assert updates[0]["loss"] == pytest.approx(1, abs=0.6)
    assert max(row["grad_norm"] for row in updates) > 1


def test_the_saved_weights_are_the_averaged_ones(finished):
    parts = ("unet", "checkpoint-4/unet", "checkpoint-4/unet_ema")
    saved, raw, averaged = (runs.read_weights(finished / part) for part in parts)
    assert all(torch.equal(saved[key], averaged[key]) for key in saved)
    assert not all(torch.equal(saved[key], raw[key]) for key in saved)


@pytest.mark.slow
def test_validation_and_sampling_do_not_disturb_training(finished, tmp_path):
    more = {"validation_steps": 1, "save_images_epochs": 1, "eval_batch_size": 3, "checkpointing_steps": 1, "seed": 3}
    train_tiny(tmp_path, **more)
    assert runs.read_metrics(tmp_path / "run")[0] == runs.read_metrics(finished)[0]
    # The three newest are kept unless told otherwise.
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 3, 4)]


@pytest.mark.slow
def test_other_choices_run_and_are_recorded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {"mixed_precision": "bf16", "in_memory_limit_mb": 0, "logger": "tensorboard", "save_model_epochs": 1}
    given |= {"train_batch_size": 1024, "distance_samples": 8, "lr_scheduler": "reduce_lr_on_plateau"}
    process = {"prediction_type": "v_prediction", "beta_schedule": "laplace", "num_steps": 50}
    objective = "ddpm:" + ",".join(f"{name}={value}" for name, value in process.items())
    output = train_tiny(tmp_path, **given, objective=objective, random_flip="true")
    config = runs.read_record(output)["config"]
    assert given.items() <= config.items()
    assert process.items() <= config["objective_kwargs"].items()
    saved = json.loads((output / "scheduler" / "scheduler_config.json").read_text())
    assert (saved["prediction_type"], saved["num_train_timesteps"]) == ("v_prediction", 50)
    (events,) = {path.parent for path in (output / "logs").rglob("events.*") if path.parent.name == "diffusers_lrlab"}
    log = EventAccumulator(str(events)).Reload()
    assert [event.step for event in log.Scalars("train/lr")] == [1, 2, 3, 4]
    assert {"train/loss", "train/grad_norm", "validation/loss_ema"} <= {*log.Tags()["scalars"]}
    assert [log.Images(name)[-1].step for name in ("samples", "plots/lr")] == [4, 4]
    assert math.isfinite(runs.read_record(output)["train"]["results"]["frechet_distance"])


@pytest.mark.slow
def test_the_launchers_environment_cannot_change_the_accumulation(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    train_tiny(tmp_path, gradient_accumulation_steps=2)
    assert [row["update"] for row in runs.read_metrics(tmp_path / "run")[0]] == [0, 1, 2, 3]


def test_frechet_distance_of_gaussians():
    """Closed form for independent coordinates: squared difference of means plus that of standard deviations."""
    from diffusers_lrlab.evaluation.features import frechet_distance

    rng = np.random.default_rng(0)
    base = rng.standard_normal((4000, 3))
    base = (base - base.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(base.T))).T  # exactly mean 0, covariance 1
    first, second = base * [1, 2, 3] + [0, 1, 0], base * [2, 2, 1] + [0, 0, 2]
    assert frechet_distance(first, second) == pytest.approx(1 + 4 + 1 + 0 + 4, rel=1e-9)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"got \(1, 3\)"):
        frechet_distance(first[:1], second)
