"""Data workers beside a process that is killed."""

import os
import time
from pathlib import Path

import psutil
import pytest
from started import Started

SCRIPT = Path(__file__).parents[1] / "scripts" / "held_up_workers.py"


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["run", "run beside a later process"])
def test_none_outlives_a_run_that_is_killed(whose):
    """Not even one that cannot notice by itself, as it waits for its source or to hand over what it has."""
    run = Started(SCRIPT, whose, env=os.environ)
    workers, others = [], []
    try:
        _until(lambda: run._streams[0].exists() and run._streams[0].read_text().count("reads") == 2 or run.poll())
        assert run.poll() is None, run.error()
        num = 2 + whose.endswith("later process")
        _until(lambda: len(psutil.Process(run.pid).children()) == num)
        workers = sorted(psutil.Process(run.pid).children(), key=lambda worker: worker.create_time())
        assert len(workers) == num
        workers, others = workers[:2], workers[2:]
        run.kill()
        _until(lambda: not psutil.wait_procs(workers, timeout=0)[1])
        assert not [worker for worker in workers if worker.is_running()]
    finally:
        run.kill()
        for worker in workers + others:
            if worker.is_running():
                worker.kill()


def _until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
