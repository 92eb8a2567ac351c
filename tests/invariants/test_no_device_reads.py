"""An update reads nothing off the device: the host would wait there for all that it has launched.

Operations are watched as torch dispatches them, and the ways around that on tensors; on a CPU, where reading costs nothing,
they are the same ones.
"""

import itertools
import json
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import begins_soon, is_installed, load_data_once
from torch.utils._python_dispatch import TorchDispatchMode

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.objective.process import OBJECTIVES
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.model import given_model_config
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.prepare import make_accelerator
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

# What gives the host a number, or a tensor whose size depends on numbers.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim"}
READS |= {"unique_consecutive", "repeat_interleave"}
AROUND = ("tolist", "cpu")  # methods that a CPU's tensors do not dispatch; numpy() takes no tensor of a device
# Its estimate of the rate is summed on the host; pairs of images and noise are assigned by scipy.
READS_BY_DESIGN = {"prodigy", "immiscible"}
MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 8, "num_layers": 1, "embedding_size": 4}


class Watched(TorchDispatchMode):
    """The reads inside this block."""

    def __init__(self):
        super().__init__()
        self.found = []

    @contextmanager
    def around(self, monkeypatch):
        """Also those that are not dispatched."""
        with monkeypatch.context() as patch, self:
            for name in AROUND:
                patch.setattr(torch.Tensor, name, _noted(name, self.found))
            yield

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if (name in READS or by_mask) and not _is_a_count_of_steps():
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _is_a_count_of_steps():
    """Torch's optimizers that are not fused count on the host, wherever the weights are."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_get_value" and frame.f_code.co_filename.endswith("torch/optim/optimizer.py"):
            return True
        frame = frame.f_back
    return False


def reads_of(folder, monkeypatch, **options):
    """What the third to fifth update of a run read."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    small = {"dataset_name": "moons", "max_train_steps": 60, "train_batch_size": 8, "num_validation_images": 0}
    small |= {"log_timestep_bins": 2, "objective": "ddpm:num_steps=24", "num_inference_steps": 2}
    small |= {"model_config_name_or_path": str(folder / "model.json"), "output_dir": str(folder / "run")}
    if "averages" in OPTIMIZERS[options.get("optimizer", "adamw")].traits:
        small |= {"use_ema": False, "lr_scheduler": "constant"}
    config = resolve_config(TrainingConfig(**{**small, **options}))
    data = load_data_once(config)
    plan = make_plan(config, data, given_model_config(config))
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = Trainer(plan, data, make_accelerator(config), RunFolder(folder / "run"))
    trainer.set_training()
    watched = Watched()
    for update, images in enumerate(itertools.islice(trainer.batches(0, range(5)), 5)):
        # Optimizers make their state in the first one.
        with watched.around(monkeypatch) if update >= 2 else nullcontext():
            trainer.run.write_rates()
            trainer.do_update(images)
            trainer.run.advance()
    return watched.found


def test_an_update_of_a_stack_reads_nothing(tmp_path, monkeypatch):
    """With the steps that are batched on a GPU; only those at logging points do."""
    members = []
    for optimizer in ("adamw", "sgd", "adam"):
        options = {"dataset_name": "moons", "max_train_steps": 60, "train_batch_size": 8, "num_validation_images": 0}
        config = resolve_config(TrainingConfig(**options, optimizer=optimizer, logging_steps=4, output_dir="run"))
        data = load_data_once(config)
        sizes = {"dimension": 2, "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
        members.append(Member(make_plan(config, data, sizes), data, torch.device("cpu")))
    updates, counts = Stack(members, torch.device("cpu"), fuse=False).updates(), []
    for _ in range(8):
        watched = Watched()
        with watched.around(monkeypatch):
            next(updates)
        counts.append(len(watched.found))
    assert [bool(count) for count in counts] == [False, False, False, True, False, False, False, True]


def _noted(name, found):
    method = getattr(torch.Tensor, name)

    def note(tensor, *args, **kwargs):
        found.append(name)
        return method(tensor, *args, **kwargs)

    return note


def test_reads_are_seen(tmp_path, monkeypatch):
    watched = Watched()
    with watched:
        assert torch.ones(1) > 0
        torch.ones(2)[torch.ones(2) > 0]
    assert len(watched.found) == 2
    assert watched.found[1] == "index"
    found = []
    _noted("tolist", found)(torch.ones(1))
    assert found == ["tolist"]
    assert "cpu" in reads_of(tmp_path, monkeypatch, noise="immiscible")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_update_reads_nothing(tmp_path, monkeypatch, objective):
    assert reads_of(tmp_path, monkeypatch, objective=f"{objective}:num_steps=24") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # optional optimizers' own
def test_nothing_that_can_be_chosen_reads(tmp_path, monkeypatch):
    for optimizer in filter(is_installed, {*OPTIMIZERS} - READS_BY_DESIGN):
        for precision in ("no", "bf16"):
            assert reads_of(tmp_path, monkeypatch, optimizer=optimizer, mixed_precision=precision) == [], optimizer
    for sampler in TIMESTEP_SAMPLERS:
        assert reads_of(tmp_path, monkeypatch, timestep_sampler=begins_soon(sampler)) == [], sampler
    for weighting in LOSS_WEIGHTINGS:
        assert reads_of(tmp_path, monkeypatch, loss_weighting=weighting) == [], weighting
    assert reads_of(tmp_path, monkeypatch, gradient_accumulation_steps=2) == []
