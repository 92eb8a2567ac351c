"""Runs with class labels: dropped labels, guidance, previews, card and metric."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from helpers import make_trainer, numbered_image

from diffusers_lrlab import ImagePipeline, TrainingConfig, train
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.diagnostics.gradient_probes import GradientProbes
from diffusers_lrlab.evaluation.metrics import _training_set_loss
from diffusers_lrlab.evaluation.registry import Evaluation
from diffusers_lrlab.finder.find import find_lr_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.preflight.checks import dead_parameters
from diffusers_lrlab.preflight.data_checks import Subject
from diffusers_lrlab.study.stacked.stacks import not_stackable
from diffusers_lrlab.training.pipeline import draw_samples

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def released():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def model_file(folder, num_embeddings, **changes):
    path = folder / "unet.json"
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**runs.TINY_UNET, "num_class_embeds": num_embeddings, **changes}))
    return path


def test_record_card_and_previews_have_the_classes(tmp_path):
    run, model = tmp_path / "run", model_file(tmp_path / "model", 11)
    small = ("--max_train_steps=8", "--train_batch_size=8", "--num_validation_images=16", "--validation_steps=4")
    drawn = ("--eval_batch_size=30", "--num_inference_steps=2", "--distance_samples=40", "--no_preflight")
    labels = ("--label_column=label", "--label_dropout=0.3", "--guidance_scale=2")
    how = (f"--model_config_name_or_path={model}", "--objective=ddpm:num_steps=20", f"--output_dir={run}")
    runs.run(*how, *small, *drawn, *labels)
    record, card = runs.read_record(run), (run / "README.md").read_text()
    assert record["train"]["class_names"] == [str(digit) for digit in range(10)]
    results = record["train"]["results"]
    assert 0 <= results["class_accuracy"] <= 1
    assert results["class_accuracy_num_samples"] == 40
    right, error = round(40 * results["class_accuracy"]), results["class_accuracy_error_of_classifier"]
    assert f"| {right} of 40, by a classifier that misreads {100 * error:.2g} % of held-out images |" in card
    for words in (
        *("A `ImagePipeline` trained by", "One row for each class, from the top: `0`, `1`", "class_labels=['0', '1']"),
        *("| Classes | `label`, 10 classes (`0`, `1`", "| Label dropout | 0.3 |", "| Guidance scale | 2.0 |"),
    ):
        assert words in card
    assert "unconditional" not in card
    assert json.loads((run / "model_index.json").read_text())["guidance_scale"] == 2
    *_, last = sorted((run / "lrlab" / "samples").glob("*.npy"))
    assert np.load(last).shape == (30, 8, 8, 1)  # a row of three for each class


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    """Dark and bright images, by folder."""
    folder = tmp_path_factory.mktemp("grey") / "data"
    for number in range(40):
        path = folder / ("bright" if number % 2 else "dark") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        numbered_image(230 - number if number % 2 else 20 + number).save(path)
    return folder


def options_of(folder, base, **options):
    given = {
        "train_data_dir": str(folder), "cache_dir": str(base / "cache"),
        "resolution": 4, "image_channels": 1, "label_column": "label", "train_batch_size": 16, "num_validation_images": 4,
        "model_config_name_or_path": str(model_file(base / "model", 3, sample_size=4)), "learning_rate": 5e-3,
        "max_train_steps": 200, "lr_warmup_steps": 0, "eval_batch_size": 8, "num_inference_steps": 10,
        "label_dropout": 0.2, "preflight": False,
    }  # fmt: skip
    return {**given, **options}


def test_a_trained_model_samples_the_classes_apart(grey, tmp_path):
    """Bright and dark; the null label samples both, and guidance moves the classes further apart."""
    options = options_of(grey, tmp_path, objective="flow_matching:num_steps=50", evaluation=False)
    train(TrainingConfig(**options, output_dir=str(tmp_path / "run")))
    pipeline = ImagePipeline.from_pretrained(tmp_path / "run")
    pipeline.set_progress_bar_config(disable=True)

    def levels(**how):
        images = pipeline(
            ["bright"] * 30 + ["dark"] * 30, generator=torch.Generator().manual_seed(0), output_type="np", **how
        )
        return images.images.mean(axis=(1, 2, 3)).reshape(2, 30).mean(axis=1) * 255

    apart, without, guided = (levels(guidance_scale=scale) for scale in (1, 0, 2))
    assert apart[0] - apart[1] > 60
    assert abs(without[0] - without[1]) < 30
    assert guided[0] - guided[1] > apart[0] - apart[1] + 10


def test_samples_have_the_labels_that_the_metric_expects(grey, tmp_path, monkeypatch):
    """Those to measure are in the proportions of the data; each pass of the pipeline gets its own share."""
    run, told = make_trainer(tmp_path / "run", options_of(grey, tmp_path, guidance_scale=3.0)).run, []
    run.model.register_forward_pre_hook(
        lambda _, given, named: told.append(named["class_labels"].tolist()), with_kwargs=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(type(run.kind), "sampling_batch", 6)
        assert draw_samples(run, 10, "frechet").shape == (10, 4, 4, 1)
    asked, steps = run.data.classes.to_measure(10).tolist(), run.config.num_inference_steps
    assert told == [asked[:6] + [2] * 6] * steps + [asked[6:] + [2] * 4] * steps
    told.clear()
    assert draw_samples(run, 9).shape == (8, 4, 4, 1)
    assert told == [[0] * 4 + [1] * 4 + [2] * 8] * steps


def test_all_that_computes_the_loss_tells_the_labels(tmp_path):
    """diffusers' UNet with class labels raises unless it is told some; runs with them are not stacked."""
    model = model_file(tmp_path / "model", 10)
    given = {"label_column": "label", "model_config_name_or_path": str(model), "max_train_steps": 4}
    trainer = make_trainer(tmp_path / "run", {**given, "num_validation_images": 40, "train_batch_size": 8})
    run, data = trainer.run, trainer.run.data
    with pytest.raises(ValueError, match="class_labels should be provided"):
        run.process.losses(run.model, Batch(data.held_out.data[:8]), data.held_out.data[:8], torch.arange(8))
    dead_parameters(Subject(trainer))
    run.validation(run.model)
    GradientProbes(data.held_out, run.process, np.array([0, 1000]), torch.device("cpu"))(run.model)
    _training_set_loss(Evaluation(run, None))
    find_lr_of(trainer, FinderConfig(num_updates=10, repeats=1))
    spec = SimpleNamespace(config=SimpleNamespace(denoiser=None, width_base=None, mixed_precision=None, data_kind="points"))
    reason = not_stackable(spec, SimpleNamespace(data=lambda _: data))
    assert reason == "stacks have no conditions, and its model takes class_labels"
