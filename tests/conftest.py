"""Fixtures that several test files use."""

import os
import sys

# Before torch is imported: two workers with two threads each would wait for each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hub_server import HubServer


@pytest.fixture
def hub(tmp_path):
    """A Hub of one's own; `env` makes a subprocess use it."""
    with HubServer(tmp_path / "hf_home") as server:
        yield server


@pytest.fixture(autouse=True)
def one_thread():
    """What a test did in this process may have set as many threads as there are cores, which other workers use."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


# Files that take longest, first of all those of real runs in processes of their own.
LONG = (
    *("test_study_runs", "test_resume", "test_training", "test_stacked_is_solo", "test_one_clock", "test_point_runs"),
    *("invariants", "test_errors", "test_lr_finder", "test_publish", "test_hub", "test_forecast", "test_preflight"),
    *("test_launch", "test_point_pipeline", "test_study_report", "test_diagnostics", "test_study_statistics"),
    *("test_study_stack", "test_optimizers", "test_rerun", "test_architecture", "test_plugin", "test_schedules"),
)


def pytest_collection_modifyitems(items):
    """The long files first, so that both workers end at about the same time; a file stays together."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: min(places.get(item.path.stem, len(LONG)), places.get(item.path.parent.name, len(LONG))))
