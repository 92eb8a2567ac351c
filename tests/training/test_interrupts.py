"""How several processes agree on a signal: without waiting for each other at every update."""

import signal

import pytest
import torch.distributed as dist

from diffusers_lrlab.core.environment import OTHERS_WAIT
from diffusers_lrlab.study.runs.context import StudyInterrupted, stops_explained
from diffusers_lrlab.training.stopping import InterruptGuard


def test_asking_waits_as_long_as_all_else_does(monkeypatch):
    """torch's default of half an hour would end the processes that wait while one samples or uploads."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **how: made.append(how))
    InterruptGuard()
    assert made == [{"backend": "gloo", "timeout": OTHERS_WAIT}]


def test_all_processes_know_what_one_received(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: tensor.clamp_(min=signal.SIGTERM))
    with InterruptGuard() as guard:
        assert guard.received() == 0
        guard._group = "of several processes"
        assert guard.received() == signal.SIGTERM


def import_as_diffusers_does():
    """It names what could not be imported, whatever the reason."""
    try:
        signal.raise_signal(signal.SIGINT)
    except Exception as error:
        raise RuntimeError("Failed to import") from error


def test_a_library_that_catches_every_exception_does_not_hide_a_stop(tmp_path):
    with pytest.raises(StudyInterrupted), stops_explained(tmp_path):
        import_as_diffusers_does()
