"""The parts of the stacked engine: networks side by side, states, samples, threads, curves."""

import copy
import dataclasses
import functools
import io
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import is_installed
from tables import cases
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_states import assert_same

from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.study.measure import Curves, draw, drawing_of
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.networks import draw_together, embed, gradients_of, predict, stack_parameters
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.study.stacked.stacks import ParallelStacks, worker_threads
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.kinds import kind_of
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config

# Optional optimizers' own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CPU = torch.device("cpu")


def networks(number, layers=2, dimension=2, dtype=torch.float32):
    """Different networks; their sizes are no powers of two."""
    found = []
    for seed in range(number):
        torch.manual_seed(seed)
        found.append(MLPDenoiser(dimension=dimension, hidden_size=24, num_layers=layers, embedding_size=12).to(dtype))
    return found


# --- networks side by side ------------------------------------------------------------------------------------------------


@cases(("dtype", "layers", "dimension"), [(torch.float64, 0, 1), (torch.float64, 3, 2), (torch.float32, 1, 5)])
def test_gradients_are_those_of_each_network(dtype, layers, dimension):
    tolerance, models = 1e-12 if dtype == torch.float64 else 1e-5, networks(3, layers, dimension, dtype)
    generator = torch.Generator().manual_seed(0)
    points, towards = torch.randn(2, 3, 10, dimension, generator=generator)
    timesteps = torch.randint(0, 100, (3, 10), generator=generator)
    weights, inputs = stack_parameters(model.parameters() for model in models), []
    prediction = predict(weights, embed(models[0], points, timesteps), inputs)
    gradients = gradients_of(weights, inputs, towards.to(dtype))
    assert all(gradient.is_contiguous() for gradient in gradients)  # else torch's fused optimizers are wrong
    for index, model in enumerate(models):
        expected = model(points[index], timesteps[index]).sample
        torch.testing.assert_close(prediction[index], expected, rtol=tolerance, atol=tolerance)
        expected.backward(towards[index].to(dtype))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient[index], parameter.grad, rtol=tolerance, atol=tolerance)


# --- stacks of runs -------------------------------------------------------------------------------------------------------

ARMS = {
    name: {"optimizer": name}
    | ({"use_ema": False, "lr_scheduler": "constant"} if "averages" in OPTIMIZERS[name].traits else {})
    for name in OPTIMIZERS
    if is_installed(name)
} | {
    "plateau": {"lr_scheduler": "reduce_lr_on_plateau:patience=0,threshold=0.3", "momentum_scheduler": "demon"},
    "greedy": {"lr_scheduler": "greedy:patience=0,smooth=true"},
    "adaptive": {"lr_scheduler": "adaptive"},
    "mdlrc": {"momentum_scheduler": "mdlrc", "lr_scheduler": "constant"},
    "follows losses": {"timestep_sampler": "loss_second_moment:history=1", "loss_weighting": "learned_log_variance"},
    "bands": {"timestep_lr": "banded:factors=[1|2]", "ema": "warmup_power:update_every=3"},
    "short": {"max_train_steps": 9},
    "diverges": {"learning_rate": 1e6, "max_grad_norm": 0.0},
}


@functools.cache
def data_of(name):
    config = resolve_config(TrainingConfig(dataset_name=name, num_validation_images=64))
    return kind_of(config).load_data(config, 1)


# Wide enough for states in 8 bits, which are of 4096 numbers at least.
def make_member(hidden_size=64, **options):
    base = {"max_train_steps": 24, "train_batch_size": 32, "num_validation_images": 64, "validation_steps": 4}
    base |= {"dataset_name": "moons", "ddpm_num_steps": 10, "logging_steps": 5, "output_dir": "run", "log_timestep_bins": 0}
    config = resolve_config(TrainingConfig(**{**base, **options}))
    data = data_of(config.dataset_name)
    model_config = {"dimension": 2, "hidden_size": hidden_size, "num_layers": 1, "embedding_size": 16}
    return Member(make_plan(config, data, model_config), data, CPU)


def make_members():
    return {name: make_member(**options) for name, options in ARMS.items()}


def train(stack, last=None):
    updates = stack.updates()
    while (last is None or stack.update < last) and next(updates, None):
        pass


@pytest.fixture(scope="module")
def without_a_stop():
    """All of [`ARMS`], trained to their ends."""
    members = make_members()
    stack = Stack(list(members.values()), CPU)
    before = [weight.clone() for weight in stack.weights]
    train(stack, 3)
    # Parameters stay views of the stack, whatever their optimizer does to them.
    for place, member in enumerate(stack.members):
        for parameter, values in zip(member.run.model.parameters(), stack.weights, strict=True):
            assert parameter.data_ptr() == values[place].data_ptr()
        assert not all(torch.equal(old[place], new[place]) for old, new in zip(before, stack.weights, strict=True))
    train(stack)
    return members


def test_the_ends_were_as_meant(without_a_stop):
    """Otherwise nothing of the kind would have been saved above."""
    for name, member in without_a_stop.items():
        assert (member.error is not None) == (name == "diverges")
    assert without_a_stop["short"].run.update == 9
    assert without_a_stop["diverges"].run.update < 24
    assert without_a_stop["plateau"].run.current_lr < without_a_stop["plateau"].run.config.learning_rate
    sampler = without_a_stop["follows losses"].run.objective.sampler
    assert sampler.probabilities(0).std() > 0


COMPARED = SimpleNamespace(metrics=("energy_distance",), stage="compare")


@cases("num", [65, 1001])
def test_samples_of_all_are_those_of_each(without_a_stop, num, monkeypatch):
    """To the bit, in one pass and in two; of averages in all their forms, and with a loss of its own beside the others."""
    members = {name: member for name, member in without_a_stop.items() if not member.error}
    for seed, member in enumerate(members.values()):
        few = {"distance_samples": num, "num_inference_steps": 2 + seed % 2, "seed": seed % 3}
        monkeypatch.setattr(member.run, "config", dataclasses.replace(member.run.config, **few))
    before = {name: copy.deepcopy(member.run.model.state_dict()) for name, member in members.items()}
    drawn = {}
    steps = draw_together([(member, spec_of(name)) for name, member in members.items()], drawn)
    assert [*steps] == [True] * (2 + 3)
    for name, member in members.items():
        assert_same(dict(member.run.model.state_dict()), dict(before[name]))
        np.testing.assert_array_equal(drawn[name], draw(member.run, drawing_of(member.run, COMPARED)))


def spec_of(name):
    return SimpleNamespace(id=name, **vars(COMPARED))


def test_worker_threads_compute_what_one_stack_does(without_a_stop, monkeypatch):
    """Saved by three workers between two logging points, continued by two in small stacks: as never stopped, to the bit."""
    stopped, members = make_members(), make_members()
    torch.set_num_threads(3)
    with worker_threads(CPU, 20) as workers:
        stacks = ParallelStacks(list(stopped.values()), CPU, threads=workers)
        assert [len(stack.members) for stack in stacks.stacks] == [
            len(ARMS) * stack // 3 - len(ARMS) * (stack - 1) // 3 for stack in (1, 2, 3)
        ]
        numbers = list(itertools.islice(stacks.updates(), 7))
        assert len(ARMS) >= numbers[0] >= numbers[-1] > 0
        states = {name: member.state_dict() for name, member in stopped.items()}
        torch.save(states, file := io.BytesIO())
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    with worker_threads(CPU, 1) as workers:  # a single member has all cores
        assert (workers.num_threads, torch.get_num_threads()) == (1, 3)
    with pytest.raises(ZeroDivisionError), worker_threads(CPU, 20) as workers:
        workers.map(lambda value: 1 / value, [1, 0, 1])
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)
    monkeypatch.setattr("diffusers_lrlab.study.stacked.stacks._CACHED_MEMBERS", 3)
    for name, state in states.items():
        members[name].run.update, members[name].error = state["update"], state["error"]
    with worker_threads(CPU, 20) as workers:
        stacks = ParallelStacks(list(members.values()), CPU, threads=workers)
        assert 2 < len(stacks.stacks) == 2 * -(-len(ARMS) // 6)
        stacks.load({members[name]: state for name, state in states.items()})
        for _ in stacks.updates():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    for name, member in members.items():
        found, expected = (each.state_dict() | {"seconds": None} for each in (member, without_a_stop[name]))
        assert_same(found, expected)


def test_who_leaves_takes_only_itself_along():
    """A view would keep the whole stack in memory, and in every file that the member is saved in."""
    short, long = make_member(max_train_steps=2), make_member(max_train_steps=3)
    stack = Stack([short, long], CPU)
    train(stack, 2)
    assert stack.members == [long]
    for parameter in short.run.model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.grad is None
    kept = [value for state in short.run.optimizer.state.values() for value in state.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in (*kept, *short.run.average.shadow_params))
    assert len(stack.weights[0]) == 1


class _Counted(TorchDispatchMode):
    """Counts operators, but for views, which launch nothing."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_more_members_launch_nothing_more():
    """Of two kinds of optimizers, each member with a rate of its own, with the batched steps of a GPU; and in sampling."""
    counts = []
    for number in (1, 4):
        rates = [(place + 1) * 1e-4 for place in range(number)]
        members = [
            make_member(learning_rate=lr, optimizer=name, distance_samples=20) for lr in rates for name in ("adamw", "sgd")
        ]
        stack = Stack(members, CPU, fuse=False)
        train(stack, 2)
        steps = draw_together([(member, spec_of(index)) for index, member in enumerate(members)], {})
        next(steps)
        for work in (stack.do_update, lambda steps=steps: next(steps)):
            with _Counted() as counted:
                work()
            counts.append(counted.count)
    assert counts[0] == counts[2]
    assert counts[3] - counts[1] == 6  # the noise of each


# --- curves ----------------------------------------------------------------------------------------------------------------


@cases("num_updates", [1, 200, 201, 999])
def test_curves_are_thinned(num_updates):
    curves = Curves(num_updates)
    for update in range(num_updates):
        curves.add_loss(update, float(update), 1 / (update + 1))
    loss = curves.to_dict()["loss"]
    assert len(loss["update"]) == min(num_updates, 200)
    assert loss["update"] == sorted(set(loss["update"]))
    assert loss["update"][-1] == num_updates - 1
    assert loss["lr"] == [1 / (update + 1) for update in loss["update"]]
    starts = [0, *(update + 1 for update in loss["update"][:-1])]
    expected = [np.mean(range(start, end + 1)) for start, end in zip(starts, loss["update"], strict=True)]
    assert loss["loss"] == pytest.approx(expected)


def test_curves_keep_what_is_finite():
    curves = Curves(3)
    assert curves.to_dict() == {"loss": {"update": [], "loss": [], "lr": []}, "quality": {}}
    for update, loss in enumerate((1.5, math.inf, math.nan)):
        curves.add_loss(update, loss, 0.1)
    curves.add_quality(1, {"validation_loss": 0.5, "validation_loss_ema": 0.75})
    curves.add_quality(2, {"validation_loss": 0.25, "validation_loss_ema": 0.5})
    assert json.loads(json.dumps(curves.to_dict(), allow_nan=False)) == {
        "loss": {"update": [0], "loss": [1.5], "lr": [0.1]},
        "quality": {"update": [1, 2], "validation_loss": [0.5, 0.25], "validation_loss_ema": [0.75, 0.5]},
    }
    assert curves.last_quality == {"validation_loss": 0.25, "validation_loss_ema": 0.5}
