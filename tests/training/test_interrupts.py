"""How several processes agree on a signal: without waiting for each other at every update."""

import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from diffusers_lrlab.core.environment import OTHERS_WAIT
from diffusers_lrlab.core.errors import Interrupted
from diffusers_lrlab.study.runs.stops import StudyInterrupted, stops_explained
from diffusers_lrlab.training.stopping import InterruptGuard


class Peer:
    """Another process that got a signal, in the place of torch's collectives: what was waited for, in order."""

    def __init__(self, monkeypatch):
        self.asked, self.waited, self.number = 0, [], 0
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op, group, async_op):
        assert async_op
        self.asked += 1
        tensor.clamp_(min=self.number)
        return Asked(self, self.asked)


class Asked:
    def __init__(self, peer, place):
        self.peer, self.place = peer, place

    def wait(self):
        self.peer.waited.append(self.place)


def make_guard():
    guard = InterruptGuard()
    guard._group = "of several processes"
    return guard


def test_asking_waits_as_long_as_all_else_does(monkeypatch):
    """torch's default of half an hour would end the processes that wait while one samples or uploads."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how))
    InterruptGuard()
    assert made == [{"backend": "gloo", "timeout": OTHERS_WAIT}]


def test_nobody_waits_for_the_question_just_asked(monkeypatch):
    peer = Peer(monkeypatch)
    with make_guard() as guard:
        assert [guard.received() for _ in range(3)] == [0, 0, 0]
        assert (peer.asked, peer.waited) == (3, [1, 2])
        peer.number = signal.SIGTERM
        assert guard.received() == 0
        assert guard.received() == signal.SIGTERM  # one update later
    assert peer.waited == [1, 2, 3, 4, 5]


def test_after_a_checkpoint_the_answer_is_of_now(monkeypatch):
    peer = Peer(monkeypatch)
    with make_guard() as guard:
        guard.received()
        peer.number = signal.SIGINT
        assert guard.received(now=True) == signal.SIGINT
        assert peer.waited == [1, 2]


def test_a_process_that_fails_waits_for_nobody(monkeypatch):
    peer = Peer(monkeypatch)
    try:
        with make_guard() as guard:
            guard.received()
            raise ValueError
    except ValueError:
        pass
    assert peer.waited == []


def stop_alone():
    """What a run of one process does with a signal."""
    with InterruptGuard() as guard:
        signal.raise_signal(signal.SIGTERM)
        raise Interrupted(guard.received(), Path("checkpoint-1"))


def test_alone_it_is_known_at_once():
    with pytest.raises(Interrupted, match="Stopped by SIGTERM"):
        stop_alone()


def import_as_diffusers_does():
    """It names what could not be imported, whatever the reason."""
    try:
        signal.raise_signal(signal.SIGINT)
    except Exception as error:
        raise RuntimeError("Failed to import") from error


def test_a_library_that_catches_every_exception_does_not_hide_a_stop(tmp_path):
    with pytest.raises(StudyInterrupted), stops_explained(tmp_path):
        import_as_diffusers_does()
