"""Small runs that others go on from, and comparisons of their ends."""

import json

import pytest
import runs
import torch
from safetensors.torch import load_file

from diffusers_lrlab import TrainingConfig, train
from diffusers_lrlab.hub.recorded_options import recorded_options
from diffusers_lrlab.hub.records import read_record

SMALL = {"_class_name": "MLPDenoiser", "hidden_size": 16, "num_layers": 1, "embedding_size": 8}
OPTIONS = {
    "dataset_name": "moons", "train_batch_size": 32, "num_validation_images": 64, "logging_steps": 2,
    "validation_steps": 2, "checkpoints_total_limit": 0, "checkpointing_steps": 5, "evaluation": False, "preflight": False,
}  # fmt: skip


def new_run(folder, name, schedule, num_updates=20, **more):
    options = {**OPTIONS, "lr_scheduler": schedule, "max_train_steps": num_updates, **more}
    return train(
        TrainingConfig(**options, model_config_name_or_path=str(folder / "model.json"), output_dir=str(folder / name))
    )


def repeated_options(run):
    """The recorded options that train a run again."""
    return recorded_options(read_record(run), str(run), repeated=True)


def from_the_start(run):
    """The run with the recorded options of another one, from its beginning."""
    return train(TrainingConfig(**repeated_options(run) | {"output_dir": f"{run}-from-the-start"}))


def assert_same_end(first, second, num_updates):
    """Bit for bit: raw and averaged weights, optimizer, schedule, and log."""
    assert (first / "lrlab/metrics.jsonl").read_text() == (second / "lrlab/metrics.jsonl").read_text()
    checkpoint = f"checkpoint-{num_updates}"
    names = [f"{checkpoint}/denoiser", f"{checkpoint}/denoiser_ema", "denoiser"]
    for name in names:
        file = f"{name}/diffusion_pytorch_model.safetensors"
        expected, found = load_file(first / file), load_file(second / file)
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items()), name
    states = [torch.load(run / checkpoint / "optimizer.bin", weights_only=True) for run in (first, second)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    trainers = [json.loads((run / checkpoint / "trainer.json").read_text()) for run in (first, second)]
    for key in ("update", "schedules", "sums", "data", "log"):
        assert trainers[0][key] == trainers[1][key], key


def logged_rates(run):
    rows, _ = runs.read_metrics(run)
    return {row["update"]: row["lr"] for row in rows}


def applied_is(run, lrs):
    """Whether the log has these rates and the audit has seen nothing else."""
    record = runs.read_record(run)
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None
    assert record["train"]["schedule_audit"]["num_updates"] == record["train"]["num_updates"] == len(lrs)
    return all(rate == pytest.approx(lrs[update], rel=1e-12, abs=1e-18) for update, rate in logged_rates(run).items())
