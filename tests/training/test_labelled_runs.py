"""A model that takes class labels, in real runs: each image has its own, whatever happens to the run."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import runs
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import config, numbered_image
from safetensors.torch import load_file

from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.data.image_loading import load_image_data
from diffusers_lrlab.diagnostics.gradients import GradientProbes
from diffusers_lrlab.evaluation.point_metrics import _training_set_loss
from diffusers_lrlab.evaluation.subject import Evaluation
from diffusers_lrlab.finder.find import find_lr_of
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.preflight.setting_checks import dead_parameters
from diffusers_lrlab.preflight.subject import Subject
from diffusers_lrlab.study.stacked.stacks import not_stackable
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

PLUGIN = Path(__file__).with_name("labelled.py")
NUM_ROWS, CORRUPT, NUM_UPDATES = 60, (5, 6, 31), 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images that are known by their level, which is their label; some are damaged."""
    folder = tmp_path_factory.mktemp("labelled") / "parquet"
    folder.mkdir()
    cells = []
    for level in range(NUM_ROWS):
        numbered_image(level).save(file := io.BytesIO(), format="png")
        cells.append({"bytes": b"damaged" if level in CORRUPT else file.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=NUM_ROWS)})
    rows = datasets.Dataset.from_dict({"image": cells, "label": [*range(NUM_ROWS)]}, features=features)
    rows.to_parquet(folder / "train.parquet", batch_size=20)
    return folder


def train(folder, output, *more, processes=1, num_updates=NUM_UPDATES):
    """A run, and what its model was told: the levels of images with their labels, and whether they were trained on."""
    seen = output.with_suffix(".jsonl")
    arguments = [
        f"--dataset_name={folder}",
        f"--cache_dir={folder.parent / 'cache'}",
        f"--output_dir={output}",
        f"--import={PLUGIN}",
        f"--max_train_steps={num_updates}",
        f"--train_batch_size={8 // processes}",
        *("--denoiser=labelled", "--resolution=4", "--image_channels=1", "--skip_corrupt_images"),
        *("--num_validation_images=10", "--validation_steps=4", "--checkpointing_steps=4", "--checkpoints_total_limit=0"),
        *("--eval_batch_size=2", "--ddpm_num_inference_steps=2", "--logging_steps=1"),
        *("--in_memory_limit_mb=0", "--no_preflight", *more),
    ]
    arguments = [each for each in arguments if not ("--streaming" in more and each.startswith("--in_memory_limit_mb"))]
    runs.run(*arguments, processes=processes, env={**runs.environment(), "LABELS_SEEN": str(seen)})
    return [json.loads(line) for line in seen.read_text().splitlines()]


def assert_own_labels(seen):
    assert all(levels == labels for levels, labels, _ in seen)
    assert not {*CORRUPT} & {label for _, labels, _ in seen for label in labels}


def trained_on(seen):
    return [labels for _, labels, is_training in seen if is_training]


def weights_of(output):
    return load_file(output / f"checkpoint-{NUM_UPDATES}" / "unet" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight") / "run"
    return output, train(folder, output)


def test_each_image_has_its_own_label_in_training_and_validation(straight):
    output, seen = straight
    assert_own_labels(seen)
    assert len(trained_on(seen)) == NUM_UPDATES
    assert len(seen) > NUM_UPDATES + 2
    embedding = weights_of(output)["embedding.weight"]
    assert embedding.shape == (65, 1)
    assert "class_labels" not in runs.read_record(output)["train"]  # the record has no word for them yet


@pytest.mark.slow
def test_two_processes_share_out_images_with_their_labels(folder, tmp_path, straight):
    seen = train(folder, tmp_path / "run", processes=2)
    assert_own_labels(seen)
    labels = sorted(label for each in trained_on(seen) for label in each)
    assert labels == sorted(label for each in trained_on(straight[1]) for label in each)
    expected, found = weights_of(straight[0]), weights_of(tmp_path / "run")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--in_memory_limit_mb=100",), id="memory", marks=pytest.mark.slow),
        pytest.param(("--dataloader_num_workers=2",), id="workers", marks=pytest.mark.slow),
        pytest.param(("--streaming", "--stream_shuffle_buffer=60"), id="stream"),
    ],
)
def test_each_way_of_reading_brings_the_labels(folder, tmp_path, way):
    seen = train(folder, tmp_path / "run", *way)
    assert_own_labels(seen)
    assert len(trained_on(seen)) == NUM_UPDATES


@pytest.mark.slow
def test_diagnostics_checks_and_finder_are_told_labels(folder, tmp_path):
    """Gradient probes at held-out images, dead parameters, and range tests."""
    diagnostics = ("--log_timestep_bins=2", "--timestep_grad_every=4", "--learning_rate=auto", "--preflight")
    seen = train(folder, tmp_path / "run", *diagnostics)
    assert_own_labels(seen)
    assert len(seen) > 100


@pytest.fixture(scope="module")
def conditional(tmp_path_factory):
    """A trainer of diffusers' UNet with class labels, which raises unless it is told some."""
    folder = tmp_path_factory.mktemp("conditional") / "run"
    options = {"dataset_name": "digits", "max_train_steps": 4, "train_batch_size": 8, "num_validation_images": 40}
    resolved = config(**options, output_dir=str(folder))
    data = load_image_data(resolved, 0, resolved.layout(1), {"class_labels": "label"})
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = {key: value for key, value in runs.TINY_UNET.items() if key != "_class_name"}
    plan = make_plan(resolved, data, {**model, "num_class_embeds": 10})
    return Trainer(plan, data, accelerator, RunFolder(folder))


PROCEDURES = {
    "dead parameters": lambda trainer: dead_parameters(Subject(trainer)),
    "range test": lambda trainer: find_lr_of(trainer, FinderConfig(num_updates=10, repeats=1, extend=False, probe_size=16)),
    "validation": lambda trainer: trainer.run.validation(trainer.run.model),
    "gradient probes": lambda trainer: GradientProbes(
        trainer.run.data.held_out, trainer.run.process, np.array([0, 1000]), torch.device("cpu")
    )(trainer.run.model),
    "training set loss": lambda trainer: _training_set_loss(Evaluation(trainer.run, None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCEDURES)
def test_a_conditional_unet_is_told_labels_by_all_that_computes_its_loss(conditional, name):
    PROCEDURES[name](conditional)


def test_a_model_is_called_with_the_conditions_by_their_keywords(conditional):
    data = conditional.run.data.in_memory[:8].data
    with pytest.raises(ValueError, match="class_labels should be provided"):
        conditional.run.process.losses(conditional.run.model, Batch(data), data, torch.arange(8))


def test_runs_with_conditions_are_not_stacked(conditional):
    """Whose networks are computed as one, which takes points and timesteps alone."""
    config = SimpleNamespace(denoiser=None, width_base=None, mixed_precision=None, data_kind="points")
    spec = SimpleNamespace(config=config)
    reason = not_stackable(spec, SimpleNamespace(data=lambda _: conditional.run.data))
    assert reason == "stacks have no conditions, and its model takes class_labels"
