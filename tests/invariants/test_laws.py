"""
The laws of a run, for each objective, network and kind of data, with labels or without in turn.

One clock, resuming to the bit, batch-split invariance, the audit of the rate, and defaults that change nothing. `ROWS` is
the table: whatever is registered as an objective or a denoiser has rows in it. Points have the law of stacks, too; all
that can be chosen in one is in `test_stacked_is_solo.py`.
"""

import dataclasses
import inspect
import math
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import UNet2DModel
from helpers import load_data_once
from latents import TINY_UNET, encode, save_vae

from diffusers_lrlab import TrainingConfig, load_image_dataset
from diffusers_lrlab.models.registry import DENOISERS, denoiser_class
from diffusers_lrlab.objective.process import OBJECTIVES, NoiseProcess
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.training.model import find_start, given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

NUM_UPDATES, KILLED, WARMUP, PEAK, BATCH = 6, 3, 2, 1e-3, 8
BASE = {
    "max_train_steps": NUM_UPDATES,
    "checkpointing_steps": KILLED,
    "checkpoints_total_limit": 0,
    "train_batch_size": BATCH,
    "learning_rate": PEAK,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": WARMUP,
    "num_validation_images": 16,
    "validation_steps": 3,
    "logging_steps": 1,
    "save_images_epochs": 10**6,
    "mixed_precision": "no",
    "output_dir": "run",
    # These look at the whole batch of an update.
    "timestep_sampler": "laplace:draw=stratified",
    "loss_weighting": "min_snr",
}
DATA = {
    "pixels": {"dataset_name": "digits", "distance_samples": 0},
    "latents": {"train_data_dir": "{place}/latents", "distance_samples": 0},
    "stream": {
        "dataset_name": "{place}/shards",
        "streaming": True,
        "save_images_epochs": None,
        "resolution": 8,
        "image_channels": 1,
        "num_classes": 10,
    },
    "points": {"dataset_name": "moons"},
}
SHAPES = {"pixels": (1, 8), "stream": (1, 8), "latents": (2, 4)}  # channels and size
LABELS = {"label_column": "label", "label_dropout": 0.3, "guidance_scale": 2.0}
# Sizes of denoisers that are large by default.
OWN = {
    "mlp": {"hidden_size": 16, "num_layers": 1, "embedding_size": 8},
    "dit": {"hidden_size": 16, "num_layers": 2, "num_heads": 2},
}


@dataclasses.dataclass(frozen=True)
class Row:
    objective: str
    network: str  # "unet", or a denoiser by name
    data: str
    has_labels: bool

    def __str__(self):
        return "-".join([self.objective, self.network, self.data, *(["labels"] if self.has_labels else [])])


def own(registry):
    """The names of this package, without those that other tests register."""
    return [name for name, entry in registry.items() if not entry.is_foreign]


def networks():
    """The networks, with the data that each takes."""
    images = ("pixels", "latents")
    takes = {name: inspect.signature(denoiser_class(name)).parameters for name in own(DENOISERS)}
    by_name = {name: ("points",) if "dimension" in parameters else images for name, parameters in takes.items()}
    return {"unet": images, **by_name}


ROWS = [
    Row(objective, network, data, has_labels=data != "points" and (first + second + third) % 2 == 1)
    for first, objective in enumerate(own(OBJECTIVES))
    for second, (network, kinds) in enumerate(networks().items())
    for third, data in enumerate(kinds)
]
ROWS += [Row("flow_matching", "unet", "stream", True)]
QUICK = {"ddpm-unet-pixels", "flow_matching-dit-latents-labels", "ddpm-mlp-points", "flow_matching-mlp-points"}


def marks_of(row):
    return () if str(row) in QUICK else pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Digits as latents and as shards of a stream, with their labels."""
    place = tmp_path_factory.mktemp("place")
    vae = str(save_vae(place / "vae"))
    encode(place / "latents", vae, flip=True)
    (place / "shards").mkdir()
    for part in range(2):
        rows = load_image_dataset("digits").select(range(part * 100, part * 100 + 100))
        rows.to_parquet(place / "shards" / f"train-{part}.parquet")
    return place


def options_of(row, place):
    own = {name: value.format(place=place) if isinstance(value, str) else value for name, value in DATA[row.data].items()}
    options = {**BASE, **own, "objective": row.objective, **(LABELS if row.has_labels else {})}
    if row.network in DENOISERS:
        return options | {"denoiser": row.network, "denoiser_kwargs": OWN.get(row.network, {})}
    (channels, size), classes = SHAPES[row.data], 11 if row.has_labels else None
    shape = {"sample_size": size, "in_channels": channels, "out_channels": channels}
    model = {**TINY_UNET, **shape, "num_class_embeds": classes}
    folder = place / f"unet-{channels}-{classes}"
    if not folder.exists():
        torch.manual_seed(0)
        UNet2DModel(**{name: value for name, value in model.items() if name != "_class_name"}).save_pretrained(folder)
    return options | {"model_config_name_or_path": str(folder)}


@contextmanager
def recorded():
    """What the updates inside this block learn from."""
    seen, losses = [], NoiseProcess.losses

    def recording(self, model, batch, noise, timesteps, *args, **kwargs):
        if torch.is_grad_enabled():  # not in validation
            labels = batch.conditions.get("class_labels", torch.zeros(len(batch)))
            seen.append([values.clone() for values in (batch.data, noise, timesteps, labels)])
        return losses(self, model, batch, noise, timesteps, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseProcess, "losses", recording)
        yield seen


def plan_of(options, checkpoint=None):
    config = resolve_config(TrainingConfig(**options))
    start, data = find_start(config, checkpoint), load_data_once(config)
    return make_plan(config, data, given_model_config(config, start), start=start), data


def train(folder, options, checkpoint=None):
    """A run in this process, from a checkpoint if one is given: its trainer, log, and what it learned from."""
    plan, data = plan_of({**options, "output_dir": str(folder)}, checkpoint)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.layout.accumulation)
    trainer = Trainer(plan, data, accelerator, RunFolder(folder))
    if checkpoint is not None:
        trainer.resume(checkpoint)
    with recorded() as seen:
        for _ in trainer.updates(show_progress=False):
            pass
    trainer.release()
    learned = [torch.cat(values) for values in zip(*seen, strict=True)]
    return SimpleNamespace(trainer=trainer, folder=folder, log=trainer.folder.read_metrics(), learned=learned)


def weights_of(run):
    """Raw and averaged weights."""
    model, average = run.trainer.run.model, run.trainer.run.average
    names = [f"averaged {name}" for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {**model.state_dict(), **dict(zip(names, average.shadow_params, strict=True))}


def assert_same_bits(run, expected):
    assert run.log == expected.log
    found, weights = weights_of(run), weights_of(expected)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module", params=[pytest.param(row, id=str(row), marks=marks_of(row)) for row in ROWS])
def row(request):
    return request.param


@pytest.fixture(scope="module")
def straight(row, place, tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight") / "run", options_of(row, place))


def cosine(update):
    """diffusers' cosine schedule, from its definition."""
    if update < WARMUP:
        return PEAK * update / WARMUP
    return PEAK * 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (NUM_UPDATES - WARMUP)))


@pytest.mark.slow
def test_the_rate_of_each_update_is_the_expected_one(straight):
    rows = [row for row in straight.log if "lr" in row]
    np.testing.assert_allclose([row["lr"] for row in rows], [cosine(update) for update in range(NUM_UPDATES)], rtol=1e-12)
    assert [row["images_seen"] for row in rows] == [BATCH * (update + 1) for update in range(NUM_UPDATES)]
    audit = straight.trainer.run.audit
    assert (audit.num_updates, audit.largest_lr_deviation, audit.first_deviating_update) == (NUM_UPDATES, 0, None)


def test_a_killed_run_ends_with_the_same_bits(row, place, straight, tmp_path):
    folder = shutil.copytree(straight.folder, tmp_path / "run")
    shutil.rmtree(folder / f"checkpoint-{NUM_UPDATES}")
    resumed = train(folder, options_of(row, place), folder / f"checkpoint-{KILLED}")
    assert_same_bits(resumed, straight)
    for found, expected in zip(resumed.learned, straight.learned, strict=True):
        assert torch.equal(found, expected[KILLED * BATCH :])


@pytest.mark.slow
def test_micro_batches_learn_from_the_same(row, place, straight, tmp_path):
    options = {"gradient_accumulation_steps": 4, "train_batch_size": BATCH // 4}
    split = train(tmp_path / "run", options_of(row, place) | options)
    for found, expected in zip(split.learned, straight.learned, strict=True):
        assert torch.equal(found, expected)
    assert split.trainer.run.audit.largest_lr_deviation == 0
    for found, expected in zip(split.log, straight.log, strict=True):
        assert found.keys() == expected.keys()
        assert found.get("lr") == expected.get("lr")
        for name in {"loss", "unweighted_loss", "validation_loss", "validation_loss_ema"} & expected.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    # In float32 the order of summation differs, and Adam divides small differences by small numbers.
    weights = weights_of(split)
    for name, value in weights_of(straight).items():
        if not name.endswith("to_k.bias"):  # attention ignores it, so its gradient is rounding noise
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3 * PEAK * NUM_UPDATES, msg=name)


def test_defaults_that_are_given_change_nothing(row, place, straight, tmp_path):
    resolved = straight.trainer.run.config
    given = {field.name: getattr(resolved, field.name) for field in dataclasses.fields(TrainingConfig)}
    assert_same_bits(train(tmp_path / "run", given), straight)


@pytest.mark.parametrize("row", [row for row in ROWS if row.data == "points"], indirect=True, ids=str)
def test_stacked_it_becomes_what_it_becomes_alone(row, place, straight):
    members = [Member(*plan_of({**options_of(row, place), "seed": seed}), torch.device("cpu")) for seed in (0, 1)]
    for _ in Stack(members, torch.device("cpu")).updates():
        pass
    member, _ = members
    member.catch_up()
    for name, value in straight.trainer.run.model.state_dict().items():
        torch.testing.assert_close(member.run.model.state_dict()[name], value, rtol=0, atol=1e-5)
    rows = [row for row in straight.log if "loss" in row]
    assert [loss for _, loss, *_ in member.curves.state_dict()["losses"]] == pytest.approx(
        [row["loss"] for row in rows], 1e-4
    )
    assert member.run.audit.largest_lr_deviation < 1e-15


def test_labels_are_told_and_some_are_dropped(row, straight):
    *_, labels = straight.learned
    if row.has_labels:
        assert 0 < (labels >= 10).sum() < len(labels)
        assert labels.unique().numel() > 5
