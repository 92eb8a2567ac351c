"""Made-up inputs are accepted as they stand or refused with a message; `python -m tests.fuzz` tries more of them."""

import pytest
from fuzz.fuzzing import corpus, search
from fuzz.targets import TARGETS, check
from tables import cases


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@cases("kind, given", corpus())
def test_what_once_failed(kind, given):
    check(kind, given, seconds=10)


@pytest.mark.parametrize("kind", TARGETS)
def test_made_up_inputs(kind):
    assert search(kind, 12, seed=0).failures == {}
