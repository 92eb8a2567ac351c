"""Batches that are read ahead, by a thread or by workers."""

import itertools
import os
import threading
from pathlib import Path

import psutil
import pytest
import runs
import torch
from started import Started

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batches import prefetched


def test_batches_are_the_same_up_to_an_error_in_its_place():
    def failing():
        yield from map(torch.tensor, range(3))
        raise LabError("gone")

    ahead = prefetched(failing())
    assert [int(next(ahead)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LabError, match="gone"):
        next(ahead)
    assert list(prefetched(torch.tensor(number) for number in range(0))) == []


def test_who_stops_early_leaves_no_thread_and_closes_the_source():
    closed = []

    def source():
        try:
            yield from map(torch.tensor, itertools.count())
        finally:
            closed.append(True)

    ahead = prefetched(source())
    assert [int(next(ahead)) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert closed == [True]
    assert "read batches" not in {thread.name for thread in threading.enumerate()}


def test_the_end_does_not_wait_for_a_source_that_hangs(monkeypatch):
    monkeypatch.setattr("diffusers_lrlab.data.batches._JOIN_SECONDS", 0.01)
    goes_on, ended = threading.Event(), threading.Event()

    def hanging():
        yield torch.tensor(1)
        goes_on.wait(60)
        ended.set()

    ahead = prefetched(hanging())
    assert next(ahead) == 1
    ahead.close()
    assert not ended.is_set()
    goes_on.set()
    assert ended.wait(60)


def test_a_slow_source_is_read_while_others_work():
    begun = [threading.Event() for _ in range(5)]

    def source():
        for number, event in enumerate(begun):
            event.set()
            yield torch.tensor(number)

    for number, _ in enumerate(prefetched(source())):
        following = begun[min(number + 1, 4)]
        assert following.wait(60)  # before it is asked for


@pytest.mark.slow
def test_no_worker_outlives_a_run_that_is_killed():
    """Not even one that waits for its source, while a later fork of the run, which has its ends of the pipes, lives on."""
    run = Started(Path(__file__).parents[1] / "scripts" / "held_up_workers.py", env=os.environ)
    children, said = [], run._streams[0]
    try:
        runs.wait_for(lambda: said.exists() and said.read_text().count("reads") == 2, run)
        runs.wait_for(lambda: len(psutil.Process(run.pid).children()) == 3, run)
        children = sorted(psutil.Process(run.pid).children(), key=lambda child: child.create_time())
        run.kill()
        runs.wait_for(lambda: not psutil.wait_procs(children[:2], timeout=0)[1])
        assert [child.is_running() for child in children] == [False, False, True]
    finally:
        for process in (run, *filter(psutil.Process.is_running, children)):
            process.kill()
