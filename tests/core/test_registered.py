"""Names of one's own: one of each kind, registered by what the package exports, and used like those that it has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from registrations import restored

import diffusers_lrlab as lab
from diffusers_lrlab.cli.show import as_text
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.evaluation.metrics import METRICS, compare_samples, evaluate, metric_label
from diffusers_lrlab.evaluation.registry import Metric
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.schedules.expected import schedule_curves
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.schedules.schedule import resolve_schedule
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

REGISTRIES = (SCHEDULERS, MOMENTUM_SCHEDULERS, TIMESTEP_SAMPLERS, LOSS_WEIGHTINGS, OPTIMIZERS, NOISES)
POWER = Parameter("power", float, 2.0, "exponent", "(0, 9]")
ABOUT = {"description": "of a test", "source": "this test"}


@pytest.fixture(autouse=True)
def nothing_stays():
    with restored(*REGISTRIES, METRICS):
        yield


def weight():
    return torch.nn.Parameter(torch.ones(1))


def test_a_schedule():
    @lab.register_schedule("mine", **ABOUT, parameters=(POWER,))
    def mine(progress, power):
        return (1 - progress.fraction) ** power

    assert "mine" in lab.list_schedulers()
    assert lab.lr_curve("mine:power=3", 1.0, 0, 4).tolist() == [1, 0.75**3, 0.5**3, 0.25**3]
    with pytest.raises(LabError, match=r"power=10 of 'mine': must be a number in \(0, 9\]"):
        lab.get_scheduler("mine:power=10", torch.optim.SGD([weight()], lr=1.0), 0, 4)


def test_a_momentum_schedule():
    @lab.register_momentum_schedule("mine", **ABOUT)
    def mine(progress, momentum):
        return momentum * (1 - progress.fraction), 1.0

    optimizer = torch.optim.SGD([weight()], lr=1.0, momentum=0.8)
    scheduler = lab.get_momentum_scheduler("mine", optimizer, 0, 4)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)


def test_a_timestep_sampler():
    @lab.register_timestep_sampler("mine", **ABOUT, parameters=(POWER,))
    def mine(progress, levels, power):
        return levels.centre**power

    probabilities = lab.get_timestep_sampler("mine:power=1", num_train_timesteps=4).probabilities(0)
    assert probabilities.tolist() == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16])


def test_a_loss_weighting():
    from diffusers import DDPMScheduler

    @lab.register_loss_weighting("mine", **ABOUT, parameters=(POWER,))
    def mine(levels, power):
        return levels.noise_rate**power

    scheduler = DDPMScheduler(num_train_timesteps=10)
    found = lab.get_loss_weighting("mine", scheduler).weights(torch.arange(10))
    torch.testing.assert_close(found, 1 - scheduler.alphas_cumprod)


def test_an_optimizer():
    @lab.register_optimizer("mine", **ABOUT, parameters=(POWER,), facts={"state_bytes": 0})
    def mine(params, lr, power):
        return torch.optim.SGD(params, lr=lr**power)

    assert lab.get_optimizer("mine", [weight()], 0.5).param_groups[0]["lr"] == 0.25


def test_a_noise():
    @lab.register_noise("mine", **ABOUT)
    def mine(noise, images, generator):
        return -noise

    assert NOISES["mine"].factory is mine


def test_a_metric():
    @lab.register_metric("mine", **ABOUT, facts={"form": "points", "unit": "m", "better": "larger", "num_generated": 7})
    def mine(real, generated):
        return float(len(generated))

    points = np.zeros((10, 2))
    assert compare_samples(points, points, names=["mine"]) == {"mine": 7}
    assert METRICS["mine"].needs == ("samples",)
    assert metric_label("mine") == "of a test, m"


def test_what_a_metric_returns_is_one_number():
    from fractions import Fraction

    for given, figure in (
        (np.float32(0.5), 0.5),
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(1.0, dtype=torch.bfloat16), 1.0),
        (Fraction(1, 4), 0.25),
        (np.int64(3), 3),
        (2**70, 2.0**70),
    ):
        got = Metric("mine", "of a test", lambda given=given: given)()["mine"]
        assert (got, type(got)) == (figure, type(figure))
    for wrong in (True, np.bool_(True), "1", None, 1 + 2j, [1.0], torch.ones(2), {"mine": 1.0}):
        with pytest.raises(LabError, match=r"The metric 'mine' must return a number, not .+test_registered\.py:\d+"):
            Metric("mine", "of a test", lambda wrong=wrong: wrong)()
    for wrong in (10**400, Fraction(10) ** 400):
        with pytest.raises(LabError, match=r"'mine' must return a number within the range of a float, not .+\.py:\d+"):
            Metric("mine", "of a test", lambda wrong=wrong: wrong)()


def test_what_a_metric_does_not_have_is_refused():
    with pytest.raises(LabError, match="The metric 'mine' got 'on_hubb'"):
        lab.register_metric("mine", **ABOUT, traits=("on_hubb",))
    with pytest.raises(LabError, match="The metric 'kl' is already registered"):
        lab.register_metric("kl", **ABOUT)(None)


def test_what_a_plug_in_returns_is_checked_before_it_is_used():
    from diffusers import DDPMScheduler

    def refused(register, function, use, message):
        with restored(*REGISTRIES):
            register("mine", **ABOUT)(function)
            with pytest.raises(LabError, match=message):
                use()

    def curve():
        lab.lr_curve("mine", 1.0, 0, 4)

    def scheduler():
        lab.get_scheduler("mine", torch.optim.SGD([weight()], lr=1.0), 0, 4)

    def momenta():
        schedule_curves(resolve_schedule("constant", None, "mine"), 1.0, 0.8, 0, 4)

    def sampler():
        lab.get_timestep_sampler("mine", num_train_timesteps=4)

    def weighting():
        lab.get_loss_weighting("mine", DDPMScheduler(num_train_timesteps=4))

    of_schedule, at = lab.register_schedule, r".+test_registered\.py:\d+"
    below = r"'mine' gives a learning rate of -0.25 at update 2: must be in \[0, inf\)"
    refused(of_schedule, lambda progress: 0.25 - progress.fraction, curve, below)
    refused(of_schedule, lambda progress: float("nan"), curve, "gives a learning rate of nan at update 0")
    needs_numpy = rf"schedule 'mine' failed at {at}: .+ use numpy instead of `if`"
    refused(of_schedule, lambda progress: 1 if progress.fraction < 0.5 else 0, curve, needs_numpy)
    for wrong in ("x", np.ones(3), 1j):
        unreal = rf"schedule 'mine' must return a real number, or .+ not {at}\."
        refused(of_schedule, lambda progress, wrong=wrong: wrong, curve, unreal)
    below = "'mine' gives a learning rate of -0.5 at update 0; use 0 or more"
    refused(of_schedule, lambda progress: -0.5, scheduler, below)
    above = r"The momentum schedule 'mine' gives a momentum of 1.7 at update 0: must be in \[0, 1\)"
    refused(lab.register_momentum_schedule, lambda progress, momentum: (1.7, 1.0), momenta, above)
    two = "'mine' must return two values, the momentum and a factor on the learning rate"
    refused(lab.register_momentum_schedule, lambda progress, momentum: (momentum, 1.0, 1.0), momenta, two)
    for density in (np.ones(3), np.array([-1.0, 1, 1, 1])):
        of_timesteps = rf"'mine' (has to give|must return) 4 densities of 0 or more, one for each timestep, not {at}\."
        refused(lab.register_timestep_sampler, lambda progress, levels, found=density: found, sampler, of_timesteps)
    for weights in (np.ones(3), -np.ones(4), np.full(4, np.nan), np.zeros(4)):
        of_timesteps = rf"'mine' (has to give|must return) 4 weights of 0 or more, one for each timestep.*, not {at}\."
        refused(lab.register_loss_weighting, lambda levels, found=weights: found, weighting, of_timesteps)
    broken = rf"The optimizer 'mine' failed at {at}: AttributeError"
    refused(
        lab.register_optimizer, lambda params, lr: params.nothing, lambda: lab.get_optimizer("mine", [weight()], 1), broken
    )


def test_a_metric_of_a_run_that_fails_is_named():
    lab.register_metric("mine", **ABOUT, facts={"form": "points", "of": "run"})(lambda evaluation: evaluation.nothing)
    run = SimpleNamespace(kind=SimpleNamespace(form="points"))
    with pytest.raises(LabError, match=r"The metric 'mine' failed at .+test_registered\.py:\d+: AttributeError"):
        evaluate(run, None, ["mine"])


def test_an_optimizer_is_listed_without_its_facts():
    lab.register_optimizer("mine", **ABOUT)(torch.optim.SGD)
    assert any(line.split() == ["mine", "of", "a", "test"] for line in as_text(OPTIMIZERS, "--optimizer", None).splitlines())
