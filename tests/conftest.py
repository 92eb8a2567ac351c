"""Fixtures that several test files use."""

import gc
import os
import sys
from types import SimpleNamespace

# Before torch is imported: two workers with two threads each would wait for each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from blank_pictures import leave_pictures_blank
from hosts import HAS_GREEDY
from hub_server import HubServer

if not HAS_GREEDY:
    # `greedy` is transformers' own: where it is not there yet, what builds it is skipped.
    skip = SimpleNamespace(GreedyWithWarmup=lambda *_, **__: pytest.skip("this transformers has no GreedyLR"))
    sys.modules["diffusers_lrlab.schedules.greedy_lr"] = skip


# Collecting garbage looks at every object there is, a million after the imports of the tests, and accelerate and statsmodels
# do it in each run and each comparison. What is there between two files does not become garbage, so it is left out.
gc.disable()  # until all tests are collected


def pytest_collection_finish():
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """What the tests of a file have imported is left out of later collections."""
    yield
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="module")
def blank_pictures():
    """For modules whose runs in this process draw what nobody looks at."""
    with pytest.MonkeyPatch.context() as patch:
        leave_pictures_blank(patch.setattr)
        yield


# Files that take longest.
LONG = (
    *(
        "test_study_runs",
        "test_study_resumed",
        "test_study_rates",
        "test_resume",
        "test_stacked_is_solo",
        "test_lr_finder",
        "test_study_report",
        "test_forecast",
    ),
    *("test_preflight", "test_study_statistics", "test_publish", "test_timesteps", "test_point_runs", "test_compatibility"),
    *("test_lora", "test_start_weights"),
    *("test_cli", "test_one_clock", "test_errors", "test_training", "test_hub", "test_upstream", "test_toy2d"),
    "test_schedule_previews",
    *("test_point_pipeline", "test_diagnostics", "test_point_metrics", "test_launch", "test_registration", "test_schedules"),
)


def pytest_collection_modifyitems(items):
    """The long files first, so that both workers end at about the same time; a file stays together."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
