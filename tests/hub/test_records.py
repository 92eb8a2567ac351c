"""What is read from the record of a run: its options, and what its card says of data, licence and limits."""

import json

import pytest
from published import RECORD
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.hub.card import model_card_text
from diffusers_lrlab.hub.records import recorded_options
from diffusers_lrlab.training.config import complete_options


@pytest.fixture
def record():
    return json.loads((RECORD / "lrlab" / "run.json").read_text())


@cases(("data", "expected"), [
    ({"dataset_name": "digits"}, "Licence: CC BY 4.0."),
    ({"dataset_name": "dino"}, "Source: "),
    ({"dataset_name": "a/faces"}, "[a/faces](https://huggingface.co/datasets/a/faces): see its card"),
    ({"dataset_name": None, "train_data_dir": "/home/me/a`b"}, "- Data: `a b`, a folder that is not published"),
])  # fmt: skip
def test_a_card_says_where_the_data_are_from(tmp_path, record, data, expected):
    record["config"] |= data
    card = model_card_text(tmp_path, record)
    assert expected in card
    assert "/home/me" not in card.split("## Data and licence")[1].split("## Limits")[0]


def test_a_card_without_a_licence_says_so(tmp_path, record):
    card = model_card_text(tmp_path, record)
    assert "\nlicense:" not in card
    assert "- Model: the licence in the metadata of this card; without one, ask its author" in card
    given = model_card_text(tmp_path, record, "mit")
    assert "\nlicense: mit\n" in given
    assert "- Model: mit." in given


def test_a_model_that_started_from_others_is_not_said_to_make_only_such_samples(tmp_path, record):
    assert "1541 images (1 x 8 x 8) and makes only such samples." in model_card_text(tmp_path, record)
    record["train"]["started_from"] = {"name_or_path": "somebody/unet", "commit": "a" * 40, "sha256": "b" * 64}
    card = model_card_text(tmp_path, record)
    assert "makes only such samples" not in card
    assert "licence of the weights that it started from also apply" in card


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
