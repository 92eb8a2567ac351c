"""Stacked = solo: a member sees what it would see by itself, becomes what it would become, and disturbs no other.

Whatever the registries hold is an arm of one stack, on data sets and with seeds in turn, compared with a run by the trainer.
"""

import functools
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import begins_soon, is_installed
from tables import cases

from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.core.errors import Diverged
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.objective.objective import Objective
from diffusers_lrlab.objective.processes import DDPM, FlowMatching
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.study.stacked.member import Member
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.timesteps.bands import TIMESTEP_LRS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.kinds import kind_of
from diffusers_lrlab.training.kinds.points import Points
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import RunFolder
from diffusers_lrlab.training.trainer import Trainer

# Optional optimizers' own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

CPU = torch.device("cpu")
SMALL = {"dimension": 2, "hidden_size": 32, "num_layers": 2, "embedding_size": 16}
BASE = {
    "dataset_name": "moons",
    "max_train_steps": 60,
    "train_batch_size": 32,
    "num_validation_images": 64,
    "validation_steps": 12,
    "logging_steps": 7,  # does not divide the length
    "log_timestep_bins": 0,
    "save_images_epochs": 10**6,
    "mixed_precision": "no",
    "output_dir": "run",
}
# In float64, and in float32 over the first updates.
EXACT, CLOSE, FIRST = 1e-9, 1e-5, 20


class Double(MLPDenoiser):
    """The network in float64; losses stay in float32, as they are."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.double()


@contextmanager
def precision(dtype):
    """Runs on points are of this precision inside this block."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(Points, "model", f"{__name__}:Double")
        yield


@functools.cache
def data_of(name):
    """Loaded once: members share the data of a set, as they do in a study."""
    config = resolve_config(TrainingConfig(**{**BASE, "dataset_name": name}))
    return kind_of(config).load_data(config, 1)


def plan_of(options):
    options = {**BASE, **SMALL, **options}
    model = {name: options.pop(name) for name in SMALL}
    config = resolve_config(TrainingConfig(**options))
    data = data_of(config.dataset_name)
    return make_plan(config, data, model), data


@contextmanager
def recorded():
    """What the updates inside this block learn from: arguments of `add_noise`, and weights by objective and update."""
    drawn, weights, weigh = [], {}, Objective.weights

    def recording(add_noise):
        def recording_add_noise(self, points, noise, timesteps):
            if torch.is_grad_enabled():  # not in validation
                drawn.append((points.clone(), noise.clone(), timesteps.clone()))
            return add_noise(self, points, noise, timesteps)

        return recording_add_noise

    def recording_weigh(self, timesteps, update):
        weights[self, update] = weigh(self, timesteps, update)
        return weights[self, update]

    with pytest.MonkeyPatch.context() as patch:
        for process in (DDPM, FlowMatching):
            patch.setattr(process, "add_noise", recording(process.add_noise))
        patch.setattr(Objective, "weights", recording_weigh)
        yield drawn, weights


def run_stack(arms, last=None, dtype=torch.float32):
    """Members that were trained side by side, to the end or to update `last`; `inputs` are what each learned from."""
    with precision(dtype), recorded() as (drawn, weights):
        members = [Member(*plan_of(options), CPU) for options in arms]
        for member in members:
            member.inputs = []
        stack = Stack(members, CPU)
        updates = stack.updates()
        while (there := list(stack.members)) and stack.update != last and next(updates, None):
            parts = (part.view(len(there), -1, *part.shape[1:]) for part in drawn.pop())
            for member, *own in zip(there, *parts, strict=True):
                member.inputs.append((*own, weights[member.run.objective, stack.update - 1]))
        for member in members:
            member.catch_up()  # as it does before its state is saved, should this be before its end
    return members


def run_solo(options, folder, last=None, dtype=torch.float32):
    """The same by the ordinary trainer."""
    with precision(dtype), recorded() as (drawn, weights):
        plan, data = plan_of(options)
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.layout.accumulation)
        trainer = Trainer(plan, data, accelerator, RunFolder(folder))
        trainer.save, trainer.inputs = lambda: None, []
        for update in trainer.updates(show_progress=False):
            parts = [torch.cat(part) for part in zip(*drawn, strict=True)]
            drawn.clear()
            trainer.inputs.append((*parts, weights[trainer.run.objective, update - 1]))
            if update == last:
                break
    return trainer


def assert_same_inputs(member, trainer, weights_tolerance=0.0):
    assert len(member.inputs) == len(trainer.inputs) == trainer.run.update == member.run.update
    for update, (found, expected) in enumerate(zip(member.inputs, trainer.inputs, strict=True)):
        for name, one, other in zip(("points", "noise", "timesteps"), found, expected, strict=False):
            assert torch.equal(one, other), f"{name} of update {update}"
        if expected[3] is None or found[3] is None:
            assert found[3] is expected[3] is None, f"weights of update {update}"
        else:
            torch.testing.assert_close(found[3], expected[3], rtol=weights_tolerance, atol=0.0)


def difference(member, trainer):
    """The largest difference of a weight, raw or averaged."""
    pairs = [*zip(trainer.run.model.parameters(), member.run.model.parameters(), strict=True)]
    for one, other in zip(trainer.run.averages, member.run.averages, strict=True):
        assert one.decay == other.decay
        pairs += zip(one.shadow_params, other.shadow_params, strict=True)
    return max((one - other).detach().abs().max().item() for one, other in pairs)


def bits(member):
    """All that a member has become, to be compared to the bit."""
    averaged = [value for average in member.run.averages for value in average.shadow_params]
    tensors = [*member.run.model.state_dict().values(), *averaged]
    return [tensor.numpy().tobytes() for tensor in tensors], member.curves.state_dict(), member.error, member.run.update


# --- what can be chosen -------------------------------------------------------------------------------------------------


def optimizer_arms():
    for name, entry in OPTIMIZERS.items():
        if is_installed(name):
            averages = {"use_ema": False, "lr_scheduler": "constant"} if "averages" in entry.traits else {}
            yield {"optimizer": name, **averages}
    # Settings of each in a stack with others, and in images.
    yield {"optimizer": "adamw:beta2_half_life=3000,tau=4000"}
    yield {"optimizer": "adamw:beta2_half_life=300,tau=4000", "gradient_accumulation_steps": 2, "train_batch_size": 16}
    yield {"optimizer": "adam:beta2_half_life=3000"}
    if is_installed("lion"):
        yield {"optimizer": "lion:tau=4000"}


def choices():
    """Every entry of every registry that points allow, and what those with switches do when they are turned."""
    yield from optimizer_arms()
    yield from ({"lr_scheduler": name} for name in SCHEDULERS)
    yield from ({"lr_scheduler": spec} for spec in REACTING)
    yield from ({"momentum_scheduler": name, "lr_scheduler": "constant"} for name in MOMENTUM_SCHEDULERS)
    yield {"momentum_scheduler": "demon", "lr_scheduler": REACTING[0]}
    for name, entry in TIMESTEP_SAMPLERS.items():
        if "internal" not in entry.traits:
            # Over 60 small updates, timesteps are seen too seldom for the usual ten losses of each.
            short = any(parameter.name == "history" for parameter in entry.parameters)
            yield {"timestep_sampler": f"{name}:history=2" if short else begins_soon(name)}
    yield {"timestep_sampler": "infonoise:num_bins=4,warmup_updates=6,refresh_every=3,min_count=1", "loss_weighting": "p2"}
    yield {"timestep_sampler": "logit_normal:unbiased=true,draw=stratified"}
    yield {"timestep_sampler": "loss_second_moment:unbiased=true,history=2", "loss_weighting": "learned_log_variance"}
    yield from ({"loss_weighting": name} for name in LOSS_WEIGHTINGS)
    yield from ({"timestep_lr": f"{name}:factors=[1|2|0.5]"} for name in TIMESTEP_LRS)
    yield {"timestep_lr": "weight:factors=[1|2]", "loss_weighting": "p2"}
    yield from ({"noise": name} for name in NOISES if "spatial" not in NOISES[name].traits)
    yield {"max_grad_norm": 0.0}
    yield {"max_grad_norm": 0.1, "ema": "warmup_power:update_every=3,start_update=5"}
    yield {"gradient_accumulation_steps": 2, "train_batch_size": 16}
    yield {"gradient_accumulation_steps": 4, "train_batch_size": 8, "noise": "immiscible", "loss_weighting": "min_snr"}
    yield from ({"ema": name} for name in EMA_FORMS if name != "posthoc")  # studies refuse its snapshots
    yield {"ema": "half_life:images=500,update_every=3"}
    yield {"ema": "constant:decay=0.5,start_update=9"}


REACTING = ("reduce_lr_on_plateau:patience=0,threshold=0.3", "greedy:patience=0,factor=0.5", "adaptive")
DATASETS = ("moons", "circle", "line")
# Data sets and seeds in turn, so that some members share their draws and others do not.
ARMS = {
    "-".join(map(str, options.values())): {"dataset_name": DATASETS[place % 3], "seed": place % 4 // 2, **options}
    for place, options in enumerate(choices())
}
SWEEPS = {torch.float64: (None, EXACT), torch.float32: (FIRST, CLOSE)}


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def sweep(request):
    """All of them as one stack; beside it how far it was trained, and the tolerance."""
    last, tolerance = SWEEPS[request.param]
    return dict(zip(ARMS, run_stack(ARMS.values(), last, request.param), strict=True)), request.param, last, tolerance


@cases("name", ARMS)
def test_whatever_can_be_chosen_is_the_same_in_a_stack(sweep, tmp_path, name):
    members, dtype, last, tolerance = sweep
    member, trainer = members[name], run_solo(ARMS[name], tmp_path / "run", last, dtype)
    if dtype == torch.float32 and difference(member, trainer) > tolerance:
        # The input of a ReLU was so near to 0 that rounding decided whether it lets a gradient through: there are five
        # million of them here, and one is. That does not happen with two seeds.
        options = {**ARMS[name], "seed": 5}
        (member,), trainer = run_stack([options], last), run_solo(options, tmp_path / "again", last)
    assert member.error is None
    # What follows the losses follows their rounding, too.
    rounded = member.run.objective.follows_losses and dtype == torch.float32
    assert_same_inputs(member, trainer, 1e-4 if rounded else 0.0)
    assert difference(member, trainer) <= tolerance
    trainer.run.write_rates()  # of the next update, as the member has them
    assert member.run.current_lr == trainer.run.current_lr
    assert member.run.current_momentum == trainer.run.current_momentum
    # A stack takes the rates of all updates from the plan, where powers round otherwise.
    assert member.run.audit.state_dict() == pytest.approx(trainer.run.audit.state_dict(), abs=1e-15)
    assert_same_log(member, trainer, 1e-6 if dtype == torch.float64 else 1e-4)


def assert_same_log(member, trainer, rtol):
    """The same rows at the same updates: losses, learning rates, validation losses."""
    rows = trainer.folder.read_metrics()
    expected = [(row["update"], row["loss"], row["lr"], row.get("beta1")) for row in rows if "loss" in row]
    kept = member.curves.state_dict()
    assert [row[0] for row in kept["losses"]] == [row[0] for row in expected]
    for found, wanted in zip(kept["losses"], expected, strict=True):  # the plan's powers round otherwise
        assert (found[2], found[3]) == (pytest.approx(wanted[2], rel=1e-14), wanted[3])
    assert [row[1] for row in kept["losses"]] == pytest.approx([row[1] for row in expected], rel=rtol)
    validations = [row for row in rows if "validation_loss" in row]
    assert [row.keys() for row in kept["quality"]] == [row.keys() for row in validations]
    for found, wanted in zip(kept["quality"], validations, strict=True):
        assert found == pytest.approx(wanted, rel=rtol)


def assert_as_alone(member, options, folder, last=None):
    """In float64, it is what the run becomes by itself."""
    trainer = run_solo(options, folder, last, torch.float64)
    assert_same_inputs(member, trainer)
    assert difference(member, trainer) <= EXACT
    assert_same_log(member, trainer, 1e-6)


def test_the_feedback_schedules_did_react(sweep):
    """Otherwise their validations would not have been compared above."""
    members, dtype, _, _ = sweep
    if dtype == torch.float32:
        pytest.skip("too short to react")
    for spec in REACTING:
        lrs = {lr for _, _, lr, _ in members[spec].curves.state_dict()["losses"][1:]}
        assert len(lrs) > 1, spec


@pytest.mark.parametrize(
    "objective", ["flow_matching:shift=2", "ddpm:prediction_type=sample", "ddpm:prediction_type=v_prediction"]
)
def test_other_objectives(tmp_path, objective):
    arms = [
        {"dataset_name": "line"},
        {"loss_weighting": "min_snr", "seed": 1},
        {"timestep_sampler": "laplace", "loss_weighting": "cosmap"},
        {"timestep_lr": "banded:factors=[1|2|0.5]", "lr_scheduler": REACTING[0]},
        {"gradient_accumulation_steps": 2, "train_batch_size": 16, **FOLLOWING},
    ]
    arms = [{**arm, "objective": objective} for arm in (arms if "flow" in objective else arms[:2])]
    for place, member in enumerate(run_stack(arms, FIRST, torch.float64)):
        assert_as_alone(member, arms[place], tmp_path / str(place), FIRST)


def test_states_in_eight_bits(tmp_path):
    """Layers of 4096 weights have them; a rounding there is some percent of an update, and stays below a whole one."""
    options = {"optimizer": "adamw_8bit", "hidden_size": 64}
    pytest.importorskip("bitsandbytes")
    member, _ = run_stack([options, {"hidden_size": 64}], FIRST)
    trainer = run_solo(options, tmp_path, FIRST)
    assert torch.uint8 in {state["state1"].dtype for state in member.run.optimizer.state.values()}
    assert_same_inputs(member, trainer)
    assert difference(member, trainer) <= member.run.config.learning_rate


# --- long runs, ends, divergence -------------------------------------------------------------------------------------------

LONG = {"logging_steps": 50, "validation_steps": 40, "max_train_steps": 400}
FOLLOWING = {"timestep_sampler": "loss_second_moment", "loss_weighting": "learned_log_variance"}
MIXED = [
    {},
    {"dataset_name": "line", "seed": 1},
    {"seed": 1, "optimizer": "sgd", "momentum_scheduler": "mdlrc:momentum_form=heavy_ball", "lr_scheduler": "constant"},
    {"lr_scheduler": REACTING[0], "timestep_sampler": "clts"},
    {"dataset_name": "circle", **FOLLOWING},
    {"dataset_name": "circle", **FOLLOWING, "learning_rate": 3e-3},  # the same draws, if they were not its own
    {
        "dataset_name": "line",
        "timestep_lr": "banded:factors=[1|2]",
        "noise": "immiscible",
        "ema": "warmup_power:update_every=10",
    },
]


def test_hundreds_of_updates(tmp_path):
    arms = [{**LONG, **options} for options in MIXED]
    for place, member in enumerate(run_stack(arms, dtype=torch.float64)):
        assert_as_alone(member, arms[place], tmp_path / str(place))


@cases(
    "bad", [{"learning_rate": 1e6}, {"learning_rate": 1e6, "optimizer": "sgd", "max_grad_norm": 0.0}], ids=["adamw", "sgd"]
)
def test_a_diverging_member_changes_no_other_bit(tmp_path, bad):
    others = [{}, {"seed": 1}, {"dataset_name": "line", "timestep_sampler": "loss_second_moment:history=2"}]
    bad = {**bad, "lr_scheduler": "constant"}
    *good, diverged = run_stack([*others, bad])
    first, _, *rest = run_stack([others[0], bad, *others[1:]])
    alone = [bits(member) for member in run_stack(others)]
    assert [bits(member) for member in good] == alone == [bits(member) for member in (first, *rest)]
    assert diverged.error is not None
    assert diverged.error.startswith(f"The loss was not finite at update {diverged.run.update}, at learning rate 1e+06")
    assert len(diverged.inputs) == diverged.run.update < 60
    with pytest.raises(Diverged, match=f"around update {diverged.run.update} "):
        run_solo(bad, tmp_path)


def test_members_that_end_early_leave(tmp_path):
    """Between two logging points of those that stay."""
    arms = [{"max_train_steps": steps, "seed": steps} for steps in (60, 20, 33, 20)]
    members = run_stack(arms, dtype=torch.float64)
    for place, (member, options) in enumerate(zip(members, arms, strict=True)):
        assert member.run.update == options["max_train_steps"]
        assert_as_alone(member, options, tmp_path / str(place))
    assert bits(members[0]) == bits(run_stack(arms[:1], dtype=torch.float64)[0])


def test_micro_batches_are_one_batch(tmp_path):
    """A stack computes all points of an update at once; a member of 2 x 16 is one of 32, and both are the trainer's."""
    halves, whole = run_stack([{"gradient_accumulation_steps": 2, "train_batch_size": 16}, {}], dtype=torch.float64)
    assert bits(halves) == bits(whole)
    assert_as_alone(halves, {}, tmp_path)


def test_neither_number_nor_order_changes_a_bit():
    expected = [bits(member) for member in run_stack(MIXED, FIRST)]
    for number in (1, 2, 3, 5):
        some = run_stack(MIXED[:number], FIRST)
        assert [bits(member) for member in some] == expected[:number], f"{number} side by side"
    backwards = run_stack(MIXED[::-1], FIRST)
    assert [bits(member) for member in backwards] == expected[::-1]


BATCHED = {
    "adamw": {},
    "no decay": {"optimizer": "adamw:weight_decay=0,beta2=0.99", "seed": 1},
    "momentum": {"momentum_scheduler": "mdlrc", "lr_scheduler": "constant"},
    "plateau": {"lr_scheduler": REACTING[0], "momentum_scheduler": "demon"},
    "bands": {"timestep_lr": "banded:factors=[1|2]", "ema": "warmup_power:update_every=3"},
    "sgd": {"optimizer": "sgd:weight_decay=0.01", "seed": 1},
    "no momentum": {"optimizer": "sgd:momentum=0"},
    "nesterov": {"optimizer": "nesterov", "momentum_scheduler": "demon"},
    "adam": {"optimizer": "adam"},  # steps by itself
    "short": {"max_train_steps": 20},
}


def test_batched_steps_are_those_of_the_optimizers(tmp_path):
    """As on a GPU; none reads back from the device, see `test_no_device_reads.py`."""
    with precision(torch.float64):
        members = [Member(*plan_of(options), CPU) for options in BATCHED.values()]
        stack = Stack(members, CPU, fuse=False)
        assert {optimizer.own.stop - optimizer.own.start for optimizer in stack.optimizers} == {6, 1}
        for _ in stack.updates():
            pass
    for place, (member, options) in enumerate(zip(members, BATCHED.values(), strict=True)):
        trainer = run_solo(options, tmp_path / str(place), dtype=torch.float64)
        assert difference(member, trainer) <= EXACT
        assert_same_log(member, trainer, 1e-6)
        saved, expected = (each.run.optimizer.state_dict()["state"] for each in (member, trainer))
        for index, state in expected.items():
            for name, value in state.items():
                torch.testing.assert_close(saved[index][name], value, rtol=1e-6, atol=1e-9)
