"""Fixtures that several test files use."""

import gc
import importlib.util
import os
import re
import sys
from pathlib import Path

# Before torch is imported: two workers with two threads each would wait for each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from blank_pictures import draw_pictures, leave_pictures_blank
from hosts import HAS_GREEDY, HAS_TRAINING
from hub_server import HubServer
from skipped_rooms import SkippedRooms

if not HAS_GREEDY:
    # `greedy` is transformers' own: where it is not there yet, what builds it is skipped.
    feedback = importlib.import_module("diffusers_lrlab.schedules.feedback")
    feedback.greedy = lambda *_, **__: pytest.skip("this transformers has no GreedyLR")

if not HAS_TRAINING:
    sys.meta_path.insert(0, SkippedRooms())


HAS_PLOTS = importlib.util.find_spec("matplotlib") is not None

# Collecting garbage looks at every object there is, a million after the imports of the tests, and accelerate and statsmodels
# do it in each run and each comparison. What is there between two files does not become garbage, so it is left out.
gc.disable()  # until all tests are collected


def pytest_collection_finish():
    if HAS_TRAINING:
        from kept_digits import keep_digits

        keep_digits()
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


@pytest.fixture(scope="module")
def browser():
    """A Chromium, for tests with the mark `needs_chromium`."""
    from chromium import Chromium

    with Chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def one_thread():
    """What a test did in this process may have set as many threads as there are cores, which other workers use."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item):
    """Plots are drawn for tests with the mark `pictures`; for the others they are one pixel, in which nothing is found."""
    if item.get_closest_marker("pictures"):
        draw_pictures()
    elif HAS_PLOTS:
        leave_pictures_blank()


SUITE = Path(__file__).parents[1] / "docs" / "suite.md"


def pytest_collection_modifyitems(items):
    """Files that take longest come first, by the tables of costs, so that both workers end at about the same time."""
    measured = re.findall(r"^\| (tests/\S+\.py) \|", SUITE.read_text(encoding="utf-8"), re.MULTILINE)
    places = {name: place for place, name in reversed([*enumerate(measured)])}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
