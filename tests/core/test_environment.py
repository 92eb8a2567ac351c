"""How many threads this process may have."""

from types import SimpleNamespace

import psutil
import pytest
import scipy.spatial
import torch

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.core import environment
from diffusers_lrlab.evaluation import distances
from diffusers_lrlab.study.run import use_all_cores
from diffusers_lrlab.training.prepare import make_accelerator
from diffusers_lrlab.training.resolve import resolve_config

LAUNCHED = {"ACCELERATE_DYNAMO_BACKEND": "NO"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}
# The environment of this process, of the one that launched it, processes, and the threads of each of them on 8 cores.
THREADS = {
    "nobody says": ({}, {}, 1, 8),
    "cores are shared": ({}, {}, 4, 2),
    "asked for": ({"OMP_NUM_THREADS": "3"}, {}, 4, 3),
    "nested": ({"OMP_NUM_THREADS": "2,1"}, {}, 1, 2),
    "none": ({"OMP_NUM_THREADS": "0"}, {}, 1, 8),
    "a launcher's own": ({"OMP_NUM_THREADS": "1", **LAUNCHED}, {}, 1, 8),
    "asked of a launcher": ({"OMP_NUM_THREADS": "1", **LAUNCHED}, {"OMP_NUM_THREADS": "1"}, 1, 1),
    "torchrun's own": ({"OMP_NUM_THREADS": "1", **TORCHRUN}, {}, 2, 4),
}


@pytest.fixture
def as_if(monkeypatch):
    """Sets the environments of this process and of the one that launched it, on 8 cores."""

    def set_environments(own, of_launcher=None):
        for name in ("OMP_NUM_THREADS", "ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(psutil, "Process", lambda _: SimpleNamespace(environ=lambda: of_launcher or {}))
        monkeypatch.setattr(environment, "available_cores", lambda: 8)

    return set_environments


@pytest.mark.parametrize("case", THREADS)
def test_what_the_user_set_is_honoured(as_if, case):
    own, of_launcher, processes, threads = THREADS[case]
    as_if(own, of_launcher)
    assert environment.allowed_threads(processes) == threads


def test_a_launcher_that_cannot_be_asked(as_if, monkeypatch):
    as_if({"OMP_NUM_THREADS": "1", **LAUNCHED})

    def refuse(_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", refuse)
    assert environment.asked_threads() is None


@pytest.mark.parametrize("start", [lambda: make_accelerator(resolve_config(TrainingConfig())), use_all_cores])
def test_the_threads_of_a_run_and_of_a_study(as_if, start):
    as_if({"OMP_NUM_THREADS": "3"})
    start()
    assert torch.get_num_threads() == 3


def test_the_threads_of_a_search_for_neighbours(monkeypatch):
    asked, tree = [], scipy.spatial.cKDTree

    def watched(points):
        return SimpleNamespace(
            query=lambda *given, workers, **more: asked.append(workers) or tree(points).query(*given, **more)
        )

    monkeypatch.setattr(scipy.spatial, "cKDTree", watched)
    torch.set_num_threads(3)
    points = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).numpy()
    distances.knn_kl(points[:10], points[10:])
    assert asked == [3, 3]
