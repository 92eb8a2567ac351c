"""Fixtures that several test files use."""

import gc
import importlib.util
import os
import sys

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
    from chromium import PROGRAM, Chromium

    with Chromium(PROGRAM) as browser:
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


# Files that take longest.
LONG = """
    test_study_spec test_stacked_is_solo test_publish test_latent_runs test_patches test_resume
    test_safety test_commands test_extend test_class_labels test_damage test_points
    test_one_clock test_toy2d test_training test_study_stack test_study_runs test_errors
    test_averaged_pipelines test_preflight test_likelihood test_timesteps
    test_study_speedups test_metric_values test_start test_signatures test_in_the_way
    test_laws test_start_weights test_study_report test_study_tuning test_batches test_point_runs test_divergence
    test_optimizers test_system_errors test_study_read test_launch test_stream_order test_latents test_image_pipeline
    test_width_runs test_diagnostics test_lr_finder test_study_resumed
    test_timestep_errors test_find_lr_hook test_schedules test_timesteps_hook
    test_point_metrics test_parity test_sampling_budget
""".split()


def pytest_collection_modifyitems(items):
    """The long files first, so that both workers end at about the same time; a file stays together."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
