"""The share of samples that show the class asked for: the classifiers, and the metric in studies."""

import json

import pytest
import runs
from accelerate.state import AcceleratorState
from helpers import load_data

from diffusers_lrlab import TrainingConfig, read_study, run_study
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.evaluation.classifier import class_reader
from diffusers_lrlab.training.resolve import resolve_config


@pytest.fixture(autouse=True)
def released():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


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


@pytest.mark.slow
def test_a_study_compares_class_accuracy(tmp_path):
    model = tmp_path / "unet.json"
    model.write_text(json.dumps({**runs.TINY_UNET, "num_class_embeds": 11}))
    base = {"train_batch_size": 8, "max_train_steps": 2, "num_validation_images": 16, "num_inference_steps": 2}
    labels = {"label_column": "label", "label_dropout": 0.1, "model_config_name_or_path": str(model), "distance_samples": 20}
    arms = {"plain": {}, "guided": {"guidance_scale": 3.0}}
    spec = {
        "title": "Guidance", "base": {**base, **labels, "objective": "ddpm:num_steps=20", "lr_warmup_steps": 0},
        "arms": arms,
        "baseline": "plain", "datasets": ["digits"], "seeds": 1, "metrics": ["class_accuracy", "frechet_distance"],
    }  # fmt: skip
    run_study(spec, tmp_path / "study", quiet=True)
    table = read_study(tmp_path / "study")
    assert set(table["arm"]) == {"plain", "guided"}
    assert table["class_accuracy"].between(0, 1).all()


def test_class_accuracy_needs_labels(tmp_path):
    spec = {
        "title": "None", "base": {"max_train_steps": 2}, "arms": {"plain": {}, "other": {"lr_scheduler": "constant"}},
        "datasets": ["digits"], "seeds": 1, "metrics": ["class_accuracy"],
    }  # fmt: skip
    with pytest.raises(LabError, match="'class_accuracy' needs class labels: give label_column"):
        run_study(spec, tmp_path / "study", quiet=True)
