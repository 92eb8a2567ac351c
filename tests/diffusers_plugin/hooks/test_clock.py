"""Expected and applied learning rates of scripts that pass their schedule to accelerate, and of those that step it alone."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers import optimization
from tables import cases
from test_launch import changed_host_script, launch

import diffusers_lrlab
from diffusers_lrlab import LabError, lr_curve
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.diffusers_plugin.hooks.clock import HostClock
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.host.run import HostRun
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.schedule import resolve_schedule

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the first micro-batches
LR, UPDATES, WARMUP = 1e-3, 6, 2


@pytest.fixture
def hooked():
    """Makes a clock whose hooks are taken away after the test."""
    patches, said = Patches(), []

    def make(fix=False, strict=False, num_updates=UPDATES, **arguments):
        run = HostRun(patches=patches)
        run.warn = said.append
        run.arguments = {"max_train_steps": num_updates, "lr_warmup_steps": WARMUP, **arguments}
        clock = HostClock(run, fix, strict)
        run.install()
        clock.install()
        return SimpleNamespace(clock=clock, said=said, run=run)

    with patches:
        yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(make, accumulation=1, prepared=True, steps="each", num_batches=None, after_prepare=False, before=False, **how):
    """
    The learning rate at each update of a loop. `steps` says when the schedule is stepped: in `"each"` micro-batch, or
    `"synced"`, after an update.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **how)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(torch.ones(num_batches or UPDATES * accumulation, 1), batch_size=1)
    scheduler = None if after_prepare else make(optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = make(optimizer) if after_prepare else scheduler
    scheduler = accelerator.prepare(scheduler) if prepared else scheduler
    lrs = []
    while len(lrs) < UPDATES:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                is_due = steps == "each" or accelerator.sync_gradients
                if before and is_due:
                    scheduler.step()
                optimizer.step()
                if accelerator.sync_gradients:
                    lrs.append(optimizer.param_groups[0]["lr"])
                if not before and is_due:
                    scheduler.step()
                optimizer.zero_grad()
    return lrs


def by_name(name, factor):
    """`get_scheduler` with lengths in multiples of updates."""
    return lambda optimizer: optimization.get_scheduler(
        name, optimizer, num_warmup_steps=WARMUP * factor, num_training_steps=UPDATES * factor
    )


# Whether accelerate steps the schedule, when the script does, and micro-batches of an update.
SHAPES = [(True, "each", 1), (True, "synced", 2), (True, "each", 4), (False, "each", 2), (False, "synced", 4)]


@pytest.mark.parametrize(("prepared", "steps", "accumulation"), SHAPES)
def test_the_clock_is_that_of_the_schedules_own_steps(hooked, prepared, steps, accumulation):
    """As many steps in an update as there are; then the length in such steps is right, and every other one is not."""
    name = "rex" if prepared else "cosine"
    per_update = accumulation if not prepared and steps == "each" else 1
    made = hooked()
    lrs = train(by_name(name, per_update), accumulation, prepared, steps)
    # In the first update all micro-batches but the last have stepped it before the optimizer does.
    expected = lr_curve(name, LR, WARMUP * per_update, UPDATES * per_update)[per_update - 1 :: per_update]
    np.testing.assert_allclose(lrs, expected, rtol=1e-12)
    assert made.said == []
    (watched,) = made.clock.watched
    assert (watched.steps_per_update, made.clock.update) == (per_update, UPDATES)
    assert made.clock.report().endswith(f"LR audit: {UPDATES} updates, every value that follows the clock was as expected.")


@pytest.mark.parametrize(("prepared", "steps", "accumulation"), SHAPES[1:])
def test_another_length_is_told_before_the_first_update(hooked, prepared, steps, accumulation):
    """By how much: against the curve of the updates, at the moments of the schedule's own steps."""
    per_update = accumulation if not prepared and steps == "each" else 1
    factor = 1 if per_update > 1 else accumulation
    made = hooked()
    lrs = np.array(train(by_name("cosine", factor), accumulation, prepared, steps))
    expected = lr_curve("cosine", LR, WARMUP * per_update, UPDATES * per_update)[per_update - 1 :: per_update]
    (text,) = made.said
    times = "once" if per_update == 1 else f"{per_update} times"
    assert f"does {UPDATES} updates and steps its schedule {times} per update, but made 'cosine' {UPDATES * factor}" in text
    assert f"will be {lrs[-1]:.4g} at the last update instead of {expected[-1]:.4g}" in text
    assert f"off by up to {np.abs(lrs - expected).max() / LR:.3g} of its peak" in made.clock.report()
    strict = hooked(strict=True)
    with pytest.raises(LabError, match=r"--strict_lr_audit: this script does 6 updates"):
        train(by_name("cosine", factor), accumulation, prepared, steps)
    assert strict.run.num_updates == 0


@pytest.mark.parametrize(("prepared", "steps", "accumulation"), SHAPES)
def test_a_fixed_clock(hooked, prepared, steps, accumulation):
    """One step per update, of a schedule as long as the run."""
    made = hooked(fix=True, strict=True)
    lrs = train(by_name("cosine", 3), accumulation, prepared, steps)
    np.testing.assert_allclose(lrs, lr_curve("cosine", LR, WARMUP, UPDATES), rtol=1e-12)
    assert made.said == ["cosine now takes 6 updates, 2 of them warm-up, one step each (--fix_lr_clock)."]
    assert f"{UPDATES} updates, every value that follows the clock was as expected" in made.clock.report()
    assert made.clock.watched[0].scheduler.last_epoch == UPDATES


@pytest.mark.parametrize("fix", [False, True])
@pytest.mark.parametrize(
    ("how", "per_update", "first"),
    [
        ({"after_prepare": True, "prepared": False}, 2, 1),  # of the optimizer that accelerate has wrapped
        ({"before": True, "prepared": False}, 2, 2),  # the schedule before the optimizer
        ({"before": True, "prepared": False, "steps": "synced", "accumulation": 4}, 1, 1),
        ({"step_scheduler_with_optimizer": False}, 2, 1),  # prepared, and stepped at each call all the same
        ({"step_scheduler_with_optimizer": False, "steps": "synced"}, 1, 0),
    ],
    ids=["after_prepare", "before_optimizer", "before_optimizer_synced", "prepared_each", "prepared_synced"],
)
def test_other_orders(hooked, how, per_update, first, fix):
    made = hooked(fix=fix, strict=True)
    lrs = train(by_name("cosine", per_update), **{"accumulation": 2, **how})
    if fix:
        expected = lr_curve("cosine", LR, WARMUP, UPDATES)
    else:
        whole = [*lr_curve("cosine", LR, WARMUP * per_update, UPDATES * per_update), 0.0]
        expected = whole[first::per_update][:UPDATES]
    np.testing.assert_allclose(lrs, expected, rtol=1e-9, atol=1e-15)
    assert f"{UPDATES} updates, every value that follows the clock was as expected" in made.clock.report()


def test_an_epoch_that_ends_within_an_update(hooked):
    """Three micro-batches in an epoch and an accumulation of 2: the second update of each epoch has one step only."""
    made = hooked()
    lrs = train(by_name("cosine", 2), 2, prepared=False, num_batches=3)
    np.testing.assert_allclose(lrs, lr_curve("cosine", LR, 4, 12)[[1, 2, 4, 5, 7, 8]], rtol=1e-12)
    assert "NOT as expected from update 1 on" in made.clock.report()


@pytest.mark.parametrize(
    ("make", "fix", "prepared"),
    [
        (diffusers_lrlab.get_rex_schedule, False, True),
        (functools.partial(transformers.get_scheduler, "rex"), True, True),
        (diffusers_lrlab.get_rex_schedule, True, False),
    ],
)
def test_a_curve_is_audited_wherever_it_is_made(hooked, prepared, fix, make):
    """As by a class path, which a program calls with the numbers that its user gave, or by transformers."""
    made = hooked(fix=fix, lr_warmup_steps=0)  # an option for the program's own schedules
    lrs = train(lambda optimizer: make(optimizer, num_warmup_steps=1, num_training_steps=UPDATES), prepared=prepared)
    np.testing.assert_allclose(lrs, lr_curve("rex", LR, 1, UPDATES), rtol=1e-12)
    assert f"rex: LR audit: {UPDATES} updates, every value that follows the clock was as expected." in made.clock.report()
    assert not any("neither audited" in text for text in made.said)
    again = hooked(fix=fix)
    lrs = train(lambda optimizer: make(optimizer, num_warmup_steps=1, num_training_steps=2 * UPDATES), prepared=prepared)
    expected = lr_curve("rex", LR, 1, UPDATES if fix else 2 * UPDATES)[:UPDATES]
    np.testing.assert_allclose(lrs, expected, rtol=1e-12)
    assert ("every value" if fix else "NOT as expected") in again.clock.report()


def test_a_schedule_of_another_optimizer_counts_no_updates(hooked):
    """A program that looks at its curve first, or trains something else."""
    made = hooked()

    def make(optimizer):
        by_name("linear", 1)(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        return by_name("cosine", 1)(optimizer)

    train(make)
    assert made.clock.update == UPDATES
    assert made.clock.report().count("LR audit") == 1


@cases("name", [name for name in SCHEDULERS if not {"feedback", "host"} & {*SCHEDULERS[name].traits}])
def test_all_curves_can_be_read_between_updates(name):
    """Where a schedule is stepped in each micro-batch, an update begins at a fraction of it."""
    try:
        schedule = resolve_schedule(name)
    except LabError:
        return  # it has parameters that must be given
    warmup = 0 if {"no_warmup", "rises"} & schedule.traits else 8
    whole, _ = schedule.at(Progress(np.arange(400), 400, warmup), LR, 0.9)
    quarters, _ = schedule.at(Progress(np.arange(1600) / 4, 400, warmup), LR, 0.9)
    np.testing.assert_array_equal(np.broadcast_to(quarters, 1600)[::4], np.broadcast_to(whole, 400))
    assert np.isfinite(quarters).all()


def test_two_processes_with_a_schedule_of_their_own(tmp_path):
    """Each steps its own in each micro-batch, whatever the others do: their number has no part in its length."""
    script = changed_host_script(
        tmp_path,
        ("loader, lr_scheduler = ", "loader = "),
        ("loader, lr_scheduler)", "loader)"),
        ("len(loader) * args.num_epochs", "args.max_train_steps * args.gradient_accumulation_steps"),
    )
    arguments = [f"--output_dir={tmp_path}", "--gradient_accumulation_steps=2", "--max_train_steps=6"]
    stderr = launch(script, *arguments, options=["--strict_lr_audit"], processes=2)
    assert "cosine: LR audit: 6 updates, every value that follows the clock was as expected." in stderr
    lrs = [row["lr"] for row in json.loads((tmp_path / "rows.json").read_text())]
    np.testing.assert_allclose(lrs, lr_curve("cosine", LR, 4, 12)[1::2], rtol=1e-12)
