"""Options of records that other versions wrote."""

import json

import pytest
from published import ROOT

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.hub.records import recorded_options
from diffusers_lrlab.training.config import complete_options


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "model_cards/ddpm-digits-8/lrlab/run.json").read_text())


def options(record, **left):
    return recorded_options({**record, "config": {**record["config"], **left}}, "run")


def test_options_that_have_left_and_decided_nothing_are_ignored(record):
    of_now = options(record)
    assert of_now["distance_samples"] == record["config"]["frechet_samples"]
    kept = {name: record["config"].get(name, value) for name, value in of_now.items() if name != "distance_samples"}
    assert of_now == {**complete_options(kept), "distance_samples": 1000}
    assert options(record, gone=False, also_gone=None, decoding="float", on_divergence="stop") == of_now


@pytest.mark.parametrize("left", [{"decoding": "draft"}, {"on_divergence": "rollback"}, {"of_the_future": 1}], ids=str)
def test_other_options_that_have_left_are_an_error(record, left):
    with pytest.raises(LabError, match=f"The record of 'run' has '{next(iter(left))}', which this version does not know"):
        options(record, **left)
