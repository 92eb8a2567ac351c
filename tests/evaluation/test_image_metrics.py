"""Metrics of images: of embedded sets by their classifiers, and of one's own on an image folder, in runs and in a study."""

import json

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from helpers import image_folder, load_data
from registrations import restored
from tables import cases

from diffusers_lrlab import read_study, register_metric, run_study
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.image_sets import IMAGE_DATASETS, load_image_dataset
from diffusers_lrlab.data.images import normalise
from diffusers_lrlab.evaluation.features import class_reader, frechet_distance, image_features
from diffusers_lrlab.evaluation.metrics import METRICS, compare_samples
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
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
    """What a registered metric was given, beside a Fréchet distance."""
    given = []

    @register_metric("brightness", **ABOUT, facts={"form": "images", "better": "neither"})
    def brightness(real, generated):
        given.append((real, generated))
        return generated.mean() - real.mean()

    @register_metric("frechet_rows", **ABOUT, facts={"form": "images"})
    def frechet_rows(real, generated):
        return frechet_distance(real.mean(axis=(2, 3)), generated.mean(axis=(2, 3)))

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


def study_of(folder, **keys):
    """A study on these images."""
    base = {**options_of(folder), "lr_warmup_steps": 0}
    datasets = {"grey": {"train_data_dir": base.pop("train_data_dir")}}
    return {"base": base, "arms": {"constant": {}, "rex": {"lr_scheduler": "rex"}}, "datasets": datasets, **keys}


def test_a_run_on_images_is_measured_by_them(folder, tmp_path, seen):
    out = tmp_path / "run"
    given = {**options_of(folder), "output_dir": out, "eval_batch_size": 4, "distance_samples": 20}
    assert main(["train", *(f"--{name}={value}" for name, value in given.items()), "--no_preflight"]) == 0
    results = json.loads((out / "lrlab" / "run.json").read_text())["train"]["results"]
    (real, samples), (again, held_out) = seen
    assert real.shape == samples.shape == (20, 8, 8, 1)
    assert held_out.shape == (10, 8, 8, 1)
    for images in (real, samples, held_out):
        assert 0 <= images.min() <= images.max() <= 1
    levels = {round(float(image[0, 0, 0]) * 255) for image in (*real, *held_out)}
    assert len(levels) == 30  # none is in both
    assert results["brightness"] == pytest.approx(float(samples.mean() - real.mean()))
    assert results["brightness_of_held_out_images"] == pytest.approx(float(held_out.mean() - again.mean()))
    assert results["distance_samples"] == 20
    assert "frechet_distance" not in results
    card = (out / "README.md").read_text()
    assert "20 samples against the training images" in card
    assert "| distance | samples | held-out images |" in card


def test_samples_are_drawn_for_them_and_a_study_that_names_none_stays_as_it_is(folder, seen):
    spec = load_spec(study_of(folder, seeds=1, metrics=["validation_loss_ema"]))
    assert resolve_config(TrainingConfig(**options_of(folder), output_dir="run")).distance_samples is None  # by the length
    with_them = expand(spec)[0].digest
    METRICS.pop("brightness"), METRICS.pop("frechet_rows")
    assert expand(spec)[0].digest == with_them
    assert resolve_config(TrainingConfig(**options_of(folder), output_dir="run")).distance_samples == 0
    with pytest.raises(LabError, match="or register a metric of images by --import"):
        resolve_config(TrainingConfig(**options_of(folder), output_dir="run", distance_samples=20))


@pytest.mark.slow
def test_a_study_measures_images_by_them(folder, tmp_path, seen):
    spec = study_of(folder, seeds=2, metrics=["frechet_rows", "brightness"])
    spec["base"]["distance_samples"] = 20
    run_study(spec, tmp_path / "study", quiet=True)
    frame = read_study(tmp_path / "study")
    assert np.isfinite(frame[["frechet_rows", "brightness"]].to_numpy()).all()
    rows = json.loads((tmp_path / "study" / "summary.json").read_text())["rows"]
    assert {row["floor"] for row in rows if row["metric"] == "frechet_rows"} <= {*frame.frechet_rows_of_held_out_images}
    with pytest.raises(LabError, match=r"'frechet_distance' needs features .*register a metric of your own images"):
        run_study({**spec, "metrics": ["frechet_distance"]}, tmp_path / "other", quiet=True)
    with pytest.raises(LabError, match="'class_accuracy' needs class labels: give label_column"):
        run_study({**spec, "datasets": ["digits"], "metrics": ["class_accuracy"]}, tmp_path / "other", quiet=True)
    spec["arms"]["rex"]["distance_samples"] = 30
    with pytest.raises(LabError, match=r"different numbers of samples \(20, 30"):
        run_study(spec, tmp_path / "other", quiet=True)


@cases("real, generated", [(IMAGES, IMAGES.reshape(30, 64)), (IMAGES, IMAGES[:, :4]), (IMAGES * np.nan, IMAGES)])
def test_images_are_checked(seen, real, generated):
    with pytest.raises(LabError, match=r"Expected images \(num, height, width, channels\) of one size in \[0, 1\], got"):
        compare_samples(real, generated, form="images")
    assert not seen


# --- embedded sets ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_DATASETS)
def test_real_images_are_nearer_than_blurred_and_random_ones(name):
    is_made = "made" in IMAGE_DATASETS[name].traits
    dataset = load_image_dataset(name, n=600 if is_made else None, resolution=16 if is_made else None)
    images = np.stack([np.asarray(image) for image in dataset["image"]])
    images = normalise(torch.from_numpy(images.reshape(*images.shape[:3], -1)).permute(0, 3, 1, 2))
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:600]]
    features = image_features(name)
    real, other = features(images[:300]), features(images[300:])
    assert real.shape == (300, 32)
    blurred = features(torch.nn.functional.avg_pool2d(images[300:], 3, stride=1, padding=1))
    noise = features(torch.rand(300, *images.shape[1:], generator=torch.Generator().manual_seed(1)) * 2 - 1)
    nearest = frechet_distance(real, other)
    assert nearest < 0.5 * frechet_distance(real, blurred)
    assert nearest < 0.1 * frechet_distance(real, noise)
    assert name in features.description


@pytest.mark.slow
def test_the_reader_of_classes_has_not_seen_held_out_images():
    """The digits' is right for nearly all held-out images, and for none whose labels are moved on by one."""
    data = load_data(resolve_config(TrainingConfig(dataset_name="digits", label_column="label")))
    reader = class_reader("digits", data.in_memory, data.held_out)
    labels = data.held_out.conditions["class_labels"].numpy()
    assert reader.error < 0.06
    assert reader.accuracy(data.held_out.data, labels) == 1 - reader.error
    assert reader.accuracy(data.held_out.data, (labels + 1) % 10) < 0.03
    assert "1,541 training images" in reader.description
