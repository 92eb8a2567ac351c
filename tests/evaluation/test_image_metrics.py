"""Metrics of images, and features of one's own for the Fréchet distance: on an image folder, in runs and in a study."""

import json

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from helpers import image_folder
from tables import cases

from diffusers_lrlab import read_study, register_features, register_metric, run_study
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import restored
from diffusers_lrlab.evaluation.evaluate import compare_samples
from diffusers_lrlab.evaluation.frechet import frechet_distance
from diffusers_lrlab.evaluation.metrics import METRICS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config

ABOUT = {"description": "of a test", "source": "a test"}
IMAGES = np.random.default_rng(0).random((30, 8, 8, 1), dtype=np.float32)


@pytest.fixture(autouse=True)
def nothing_stays():
    with restored(METRICS):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def seen():
    """What a registered metric and registered features were given."""
    given = {"metric": [], "features": []}

    @register_metric("brightness", **ABOUT, facts={"form": "images", "better": "neither"})
    def brightness(real, generated):
        given["metric"].append((real, generated))
        return generated.mean() - real.mean()

    @register_features("rows", **ABOUT)
    def rows(images):
        given["features"].append(images)
        return torch.from_numpy(images.mean(axis=(2, 3)))

    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("images")
    image_folder(where / "data", 60, (8, 8))
    runs.tiny_arguments(where)
    return where


def options_of(folder):
    return {
        "train_data_dir": str(folder / "data"), "resolution": 8, "image_channels": 1, "max_train_steps": 2,
        "train_batch_size": 4, "num_validation_images": 10, "ddpm_num_steps": 10, "num_inference_steps": 2,
        "model_config_name_or_path": str(folder / "tiny-unet-0.0.json"),
    }  # fmt: skip


def spec_parts(folder):
    """The base of a study on these images, and its data sets."""
    base = {**options_of(folder), "lr_warmup_steps": 0}
    return base, {"grey": {"train_data_dir": base.pop("train_data_dir")}}


def train(folder, out, **options):
    given = {**options_of(folder), "output_dir": out, "eval_batch_size": 4, **options}
    assert main(["train", *(f"--{name}={value}" for name, value in given.items()), "--no_preflight"]) == 0
    return json.loads((out / "lrlab" / "run.json").read_text())["train"]["results"]


def test_a_run_on_images_is_measured_by_them(folder, tmp_path, seen):
    results = train(folder, tmp_path / "run", distance_samples=20)
    (real, samples), (again, held_out) = seen["metric"]
    assert real.shape == samples.shape == (20, 8, 8, 1)
    assert held_out.shape == (10, 8, 8, 1)
    for images in (real, samples, held_out):
        assert 0 <= images.min() <= images.max() <= 1
    levels = {round(float(image[0, 0, 0]) * 255) for image in (*real, *held_out)}
    assert len(levels) == 30  # these images as they are in their files, and none is in both
    assert levels <= {*range(256)}
    assert results["brightness"] == pytest.approx(float(samples.mean() - real.mean()))
    assert results["brightness_of_held_out_images"] == pytest.approx(float(held_out.mean() - again.mean()))
    rows = [images.mean(axis=(2, 3)) for images in (real, samples)]
    assert results["frechet_rows"] == pytest.approx(frechet_distance(*rows))
    assert results["frechet_rows_of_held_out_images"] >= 0
    assert results["distance_samples"] == 20
    assert "frechet_distance" not in results
    card = (tmp_path / "run" / "README.md").read_text()
    assert "20 samples against the training images" in card
    assert "| distance | samples | held-out images |" in card


def test_samples_are_drawn_for_them_as_for_digits(folder, seen, monkeypatch):
    config = resolve_config(TrainingConfig(**options_of(folder), output_dir="run"))
    assert config.distance_samples is None  # as many as the length of the run allows
    METRICS.pop("brightness"), METRICS.pop("frechet_rows")
    assert resolve_config(TrainingConfig(**options_of(folder), output_dir="run")).distance_samples == 0
    with pytest.raises(LabError, match=r"or register features or a metric of images by --import"):
        resolve_config(TrainingConfig(**options_of(folder), output_dir="run", distance_samples=20))


@pytest.mark.slow
def test_a_study_measures_images_by_them(folder, tmp_path, seen):
    arms = {"constant": {"lr_scheduler": "constant"}, "rex": {"lr_scheduler": "rex"}}
    base, datasets = spec_parts(folder)
    base["distance_samples"] = 20
    spec = {"base": base, "arms": arms, "datasets": datasets, "seeds": 2, "metrics": ["frechet_rows", "brightness"]}
    run_study(spec, tmp_path / "study", quiet=True)
    frame = read_study(tmp_path / "study")
    assert len(frame) == 4
    assert np.isfinite(frame[["frechet_rows", "brightness", "frechet_rows_of_held_out_images"]].to_numpy()).all()
    rows = json.loads((tmp_path / "study" / "summary.json").read_text())["rows"]
    floors = {row["floor"] for row in rows if row["metric"] == "frechet_rows"}
    assert floors <= {*frame.frechet_rows_of_held_out_images}
    with pytest.raises(LabError, match=r"'frechet_distance' needs features .*register_features gives others"):
        run_study({**spec, "metrics": ["frechet_distance"]}, tmp_path / "other", quiet=True)
    arms["rex"]["distance_samples"] = 30
    with pytest.raises(LabError, match=r"different numbers of samples \(20, 30"):
        run_study(spec, tmp_path / "other", quiet=True)


def test_a_metric_that_no_study_names_changes_no_run(folder, seen):
    from diffusers_lrlab.study.spec.expansion import expand
    from diffusers_lrlab.study.spec.reading import load_spec

    base, datasets = spec_parts(folder)
    spec = {"base": base, "arms": {"a": {}}, "datasets": datasets, "seeds": 1, "metrics": ["validation_loss_ema"]}
    with_it = expand(load_spec(spec))[0].digest
    METRICS.pop("brightness"), METRICS.pop("frechet_rows")
    assert expand(load_spec(spec))[0].digest == with_it


@cases("real, generated", [
    (IMAGES.reshape(30, 64), IMAGES.reshape(30, 64)),
    (IMAGES, IMAGES[:, :4]),
    (IMAGES, 2 * IMAGES - 1),
    (IMAGES, IMAGES * 255),
])  # fmt: skip
def test_images_are_checked(seen, real, generated):
    with pytest.raises(LabError, match=r"Expected images \(num, height, width, channels\) of one size in \[0, 1\], got"):
        compare_samples(real, generated, form="images")
    assert not seen["metric"]


@cases("value, expected", [
    (lambda images: images, "(30, dimension), not an array of float32 of shape (30, 8, 8, 1)"),
    (lambda images: images[1:, 0, :, 0], "must return finite numbers of shape (30, dimension), not an array"),
    (lambda images: None, "must return finite numbers of shape (30, dimension), not None"),
    (lambda images: images[:, 0, :, 0] * np.nan, "some are not finite"),
    (lambda images: images.nothing, "'numpy.ndarray' object has no attribute 'nothing'"),
])  # fmt: skip
def test_features_that_cannot_be_used_are_named_with_their_line(value, expected):
    METRICS.pop("frechet_mine", None)
    register_features("mine", **ABOUT)(value)
    with pytest.raises(LabError) as error:
        compare_samples(IMAGES, IMAGES, names=["frechet_mine"], form="images")
    assert "The features 'mine'" in str(error.value)
    assert expected in str(error.value)
    assert "test_image_metrics.py" in str(error.value)
