"""Schedules of a script by the checkpoints of other schedules."""

import pytest
import torch
from diffusers.optimization import get_scheduler as host_scheduler

from diffusers_lrlab import get_scheduler
from diffusers_lrlab.core.progress import Progress
from diffusers_lrlab.diffusers_plugin.host.watched_schedule import WatchedFeedback, WatchedSchedule
from diffusers_lrlab.schedules.resolve import resolve_schedule


def built(make, name):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return optimizer, make(name, optimizer, num_warmup_steps=8, num_training_steps=40)


def followed(name):
    optimizer, scheduler = built(get_scheduler, name)
    return optimizer, scheduler, WatchedFeedback(resolve_schedule(name), scheduler, False)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau:patience=0,factor=0.5", "adaptive"])
@pytest.mark.parametrize(("make", "steps_per_update"), [(host_scheduler, 2), (get_scheduler, 1)])
@pytest.mark.parametrize(("update", "lr"), [(4, 0.5), (12, 1.0)])
def test_one_that_follows_a_loss_after_one_of_the_clock(name, make, steps_per_update, update, lr):
    """It is shown no loss of before; the updates are those of the checkpoint, and warm-up is not done twice."""
    optimizer, before = built(make, "cosine")
    for _ in range(update * steps_per_update):
        optimizer.step()
        before.step()
    optimizer, scheduler, follower = followed(name)
    follower.own_steps_per_update = steps_per_update
    note = follower.load_state_dict(before.state_dict())
    assert f"From update {update} on, the learning rate follows" in note
    assert (scheduler.num_updates, optimizer.param_groups[0]["lr"]) == (update, lr)
    scheduler.advance()
    scheduler.step(1.0)
    _, again, follower = followed(name)
    assert follower.load_state_dict(scheduler.state_dict()) is None
    assert again.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "adaptive"])
def test_one_of_the_clock_after_one_that_follows_a_loss(name):
    """Which counts its updates itself, however many processes there were."""
    _, before, _ = followed(name)
    for _ in range(12):
        before.advance()
    optimizer, scheduler = built(get_scheduler, "cosine")
    watched = WatchedSchedule(resolve_schedule("cosine"), scheduler, optimizer, Progress(0, 40, 8), False)
    watched.own_steps_per_update = 2
    assert "From update 12 on" in watched.load_state_dict(before.state_dict())
