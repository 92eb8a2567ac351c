"""Compiled models: plain keys in checkpoints, resuming to the bit, few graphs, and a run's identity."""

import json

import helpers
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from trainer_states import assert_same, state_of

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.prepare import prepare

MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 8, "num_layers": 2, "embedding_size": 4}


def make_trainer(folder, backend="eager", model=MODEL, **more):
    """A trainer of a tiny model, compiled by a backend."""
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text(json.dumps(model))
    small = {"dataset_name": "moons", "max_train_steps": 8, "train_batch_size": 32, "num_validation_images": 16}
    small |= {"logging_steps": 2, "validation_steps": 3, "log_timestep_bins": 2, "checkpointing_steps": 4}
    small |= {"ddpm_num_steps": 8, "num_inference_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        return helpers.make_trainer(folder, {**small, "model_config_name_or_path": str(folder / "model.json"), **more})


def train(trainer, until=8):
    for update in trainer.updates(show_progress=False):
        if update == until:
            break
    return trainer


def test_a_compiled_run_has_plain_keys_and_is_resumed_by_compiled_ones_alone(tmp_path):
    trainer = make_trainer(tmp_path)
    assert type(trainer.run.model).__name__ == "MLPDenoiser"
    checkpoint = trainer.save()
    saved = runs.read_weights(checkpoint / "denoiser")
    assert {*saved} == {*type(trainer.run.model)(**trainer.run.plan.model_config).state_dict()}
    again = make_trainer(tmp_path)
    for parameter in again.run.model.parameters():
        parameter.data.zero_()
    again.resume(checkpoint)
    assert_same(again.run.model.state_dict(), saved)
    with pytest.raises(LabError, match="compile: 'eager' then, 'no' now"):
        make_trainer(tmp_path, backend="no").resume(checkpoint)


UNET = {"model": runs.TINY_UNET, "dataset_name": "digits", "train_batch_size": 4, "save_images_epochs": 10**6}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of what inductor and dynamo do
@pytest.mark.parametrize(
    ("backend", "blocks", "options", "most"),
    [("inductor", [], {}, 2), ("eager", ["ResnetBlock2D"], UNET, 16)],
)
def test_few_graphs_over_a_whole_schedule_and_the_same_bits_after_resuming(
    tmp_path, monkeypatch, backend, blocks, options, most
):
    """Validation, samples, logs and rates that change are between and beside the updates."""
    monkeypatch.setattr("diffusers.UNet2DModel._repeated_blocks", blocks, raising=False)
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    graphs.clear()
    whole = train(make_trainer(tmp_path / "whole", backend, **options))
    assert 1 <= graphs["unique_graphs"] <= most, graphs
    part = train(make_trainer(tmp_path / "part", backend, **options), until=4)
    again = make_trainer(tmp_path / "part", backend, **options)
    again.resume(part.save())
    train(again)
    expected, found = state_of(whole), state_of(again)
    for state in (expected, found):
        state["clock"] = state["clock"][:2]  # without seconds
    assert_same(found, expected)


def test_the_launchers_backend_is_part_of_the_configuration(tmp_path, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    options = {"dataset_name": "moons", "max_train_steps": 2, "num_validation_images": 0, "train_batch_size": 4}
    plan, _, accelerator = prepare(TrainingConfig(output_dir=str(tmp_path / "run"), **options))
    assert accelerator.state.dynamo_plugin.backend.value.lower() == "eager"
    assert "compiled for training" in describe_plan(plan)
