"""Small runs that others go on from, and comparisons of their ends."""

import pytest
import runs
import torch
from safetensors.torch import load_file
from trainer_states import assert_same

from diffusers_lrlab import TrainingConfig, train
from diffusers_lrlab.hub.records import read_record, recorded_options

OPTIONS = {
    "dataset_name": "moons", "train_batch_size": 32, "num_validation_images": 64, "logging_steps": 2,
    "validation_steps": 2, "checkpoints_total_limit": 0, "checkpointing_steps": 5, "evaluation": False, "preflight": False,
    "denoiser": "mlp:hidden_size=16,num_layers=1,embedding_size=8",
}  # fmt: skip


def new_run(folder, name, schedule, num_updates=20, **more):
    options = {**OPTIONS, "lr_scheduler": schedule, "max_train_steps": num_updates, **more}
    return train(TrainingConfig(**options, output_dir=str(folder / name)))


def repeated_options(run):
    """The recorded options that train a run again."""
    return recorded_options(read_record(run), str(run), repeated=True)


def from_the_start(run):
    """The run with the recorded options of another one, from its beginning."""
    return train(TrainingConfig(**repeated_options(run) | {"output_dir": f"{run}-from-the-start"}))


def assert_same_end(first, second, num_updates):
    """Bit for bit: log, pipeline, and the last checkpoint with raw and averaged weights and the state of every part."""
    assert (first / "lrlab/metrics.jsonl").read_text() == (second / "lrlab/metrics.jsonl").read_text()
    files = (*first.glob("*/*.safetensors"), *first.glob(f"checkpoint-{num_updates}/*/*.safetensors"))
    names = [file.relative_to(first) for file in files]
    assert len(names) >= 3
    for name in names:
        assert_same(load_file(first / name), load_file(second / name), str(name))
    states = [load_state(folder / f"checkpoint-{num_updates}") for folder in (first, second)]
    assert_same(*states, "state")


def load_state(checkpoint):
    """The state of every part, without seconds."""
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    del state["run"]["seconds"]
    return state


def applied_is(run, lrs):
    """Whether the log has these rates and the audit has seen nothing else."""
    record = runs.read_record(run)
    assert record["train"]["schedule_audit"]["first_deviating_update"] is None
    assert record["train"]["schedule_audit"]["num_updates"] == record["train"]["num_updates"] == len(lrs)
    rows, _ = runs.read_metrics(run)
    return all(row["lr"] == pytest.approx(lrs[row["update"]], rel=1e-12, abs=1e-18) for row in rows)
