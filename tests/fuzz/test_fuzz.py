"""Made-up inputs are accepted as they stand or refused with a message; `python -m tests.fuzz` tries more of them."""

import json
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, check, search
from tables import cases

CORPUS = Path(__file__).with_name("corpus.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@cases("case", map(json.loads, CORPUS))
def test_what_once_failed(case):
    check(case["kind"], case["input"], seconds=10)


@pytest.mark.parametrize("kind", TARGETS)
def test_made_up_inputs(kind):
    assert search(kind, 12, seed=0).failures == {}
