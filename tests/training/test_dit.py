"""A DiT by name: its size for the data, its labels, and what is refused."""

from unittest.mock import Mock

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import LabelEmbedding
from helpers import config, load_data_once
from tables import cases

from diffusers_lrlab import LabError
from diffusers_lrlab.data import loading
from diffusers_lrlab.models.networks import NULL_LABEL, DiT
from diffusers_lrlab.preflight.checks import dead_parameters
from diffusers_lrlab.preflight.data_checks import Subject
from diffusers_lrlab.run.train import run_training
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.model import find_start, given_model_config, make_model
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.prepare import make_accelerator
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

TINY = "dit:hidden_size=8,num_layers=2,num_heads=2,patch_size=4"
LABELS = {"label_column": "label", "label_dropout": 0.5}


def plan_of(**options):
    resolved = config(**{"denoiser": TINY, "max_train_steps": 4, "num_validation_images": 16, **options})
    data = load_data_once(resolved)
    return make_plan(resolved, data, given_model_config(resolved)), data


def trainer_of(tmp_path, **options):
    plan, data = plan_of(output_dir=str(tmp_path / "run"), mixed_precision="no", **options)
    return Trainer(plan, data, make_accelerator(plan.config), RunFolder(tmp_path / "run", is_writer=True))


@cases("size, num_images, expected", [(4, 1541, (64, 4, 1)), (32, 50_000, (256, 8, 2)), (256, 10**6, (384, 12, 16))])
def test_it_fits_the_data(size, num_images, expected):
    found = DiT().sizes({}, {"sample_size": size, "in_channels": 4, "out_channels": 4}, num_images)
    hidden_size = found["num_attention_heads"] * found["attention_head_dim"]
    assert (hidden_size, found["num_layers"], found["patch_size"]) == expected
    assert found["attention_head_dim"] == 32


REFUSED = [
    ({"denoiser": "dit:patch_size=3"}, "patch_size=3 of dit: must be one of 1, 2, 4, got 3"),
    ({"denoiser": "dit:hidden_size=64,num_heads=3"}, "num_heads=3 of dit: must be a divisor of 64"),
    ({"num_classes": 1001, "label_column": "label"}, "--num_classes 1001: must be at most 1000"),
    ({"dataset_name": "moons"}, "--denoiser dit does not suit points: .* takes no dimension"),
]


@cases("options, message", REFUSED)
def test_what_does_not_fit_is_refused_before_data_are_read(monkeypatch, tmp_path, options, message):
    monkeypatch.setattr(loading, "load_image_data", Mock(side_effect=AssertionError("data were read")))
    with pytest.raises(LabError, match=message):
        run_training(TrainingConfig(**{"denoiser": "dit", "max_train_steps": 2, "output_dir": str(tmp_path), **options}))


def test_in_training_labels_are_dropped_once_for_the_null_label(tmp_path):
    trainer, seen = trainer_of(tmp_path, **LABELS, train_batch_size=32), []
    for module in trainer.run.model.modules():
        if isinstance(module, LabelEmbedding):
            module.embedding_table.register_forward_pre_hook(lambda _, args: seen.append(args[0].tolist()))
    trainer.set_training()
    for update, batch in enumerate(trainer.batches(0, range(2))):
        seen.clear()
        trainer.do_update(batch)
        assert seen == [batch.conditions["class_labels"].tolist()] * 3
        assert NULL_LABEL in seen[0]
        assert 10 not in seen[0], update
    trainer.release()


def test_a_model_with_weights_to_start_from_drops_no_labels_either(tmp_path):
    plan, _ = plan_of()
    DiTTransformer2DModel(**plan.model_config).save_pretrained(tmp_path / "weights")
    resolved = config(
        denoiser="dit", max_train_steps=4, num_validation_images=16, pretrained_model_name_or_path=str(tmp_path / "weights")
    )
    start = find_start(resolved)
    model = make_model(resolved, given_model_config(resolved, start), start)
    assert {module.dropout_prob for module in model.modules() if isinstance(module, LabelEmbedding)} == {0.0}
    saved = DiTTransformer2DModel.from_pretrained(tmp_path / "weights").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_weights_of_another_dit_are_refused(tmp_path):
    plan, _ = plan_of()
    DiTTransformer2DModel(**{**plan.model_config, "num_embeds_ada_norm": 10}).save_pretrained(tmp_path / "weights")
    resolved = config(denoiser="dit", max_train_steps=4, pretrained_model_name_or_path=str(tmp_path / "weights"))
    with pytest.raises(LabError, match=r"num_embeds_ada_norm=10 of the model '.*': must be 1000.*DiTPipeline"):
        given_model_config(resolved, find_start(resolved))


def test_all_parameters_learn_though_its_gates_begin_at_zero(tmp_path):
    trainer = trainer_of(tmp_path, **LABELS)
    model = trainer.run.model.eval()
    # The identity at first: the prediction is that of a model without blocks, zero.
    assert not model(torch.randn(2, 1, 8, 8), timestep=torch.tensor([1, 2]), class_labels=torch.tensor([1, 2])).sample.any()
    assert dead_parameters(Subject(trainer)) is None
    trainer.release()
