"""Records of version 0.1.0 can be read by versions with more options."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from diffusers_lrlab.core.options import DRAWS, option
from diffusers_lrlab.finder import result as saved_result
from diffusers_lrlab.hub.card import write_model_card
from diffusers_lrlab.training import choices, config
from diffusers_lrlab.training.config import TrainingConfig

RUN = Path(__file__).parents[1] / "compatibility" / "v0.1.0" / "run"


@dataclass(frozen=True, kw_only=True)
class WiderConfig(TrainingConfig):
    sharpening: str = option("none", "Made up.", DRAWS, registry="timesteps.registries:LOSS_WEIGHTINGS")
    sharpening_kwargs: dict | None = option(None, "Its parameters.", DRAWS)


@pytest.fixture
def record(monkeypatch):
    for module in (config, saved_result, choices):
        monkeypatch.setattr(module, "TrainingConfig", WiderConfig)
    monkeypatch.setattr(choices, "LEARNED_FROM", (*choices.LEARNED_FROM, "sharpening"))
    return json.loads((RUN / "lrlab" / "run.json").read_text())


def test_the_card_of_an_older_record_is_written(tmp_path, record):
    write_model_card(tmp_path, record)
    assert "`none`" in (tmp_path / "README.md").read_text()


def test_choices_of_an_older_record_are_described(record):
    assert choices.describe_choices(record["config"])[-1] == ("sharpening", "none")


@pytest.mark.parametrize("kwargs", [None, {}], ids=["as asked for", "resolved"])
def test_an_older_result_of_the_finder_is_read(tmp_path, record, kwargs):
    train = record["train"]
    with pytest.MonkeyPatch.context() as before:
        for module in (config, saved_result):
            before.setattr(module, "TrainingConfig", TrainingConfig)
        deciding = saved_result.deciding(record["config"], train["num_parameters"], train["global_batch"])
    found = {"learning_rate": 1e-3, "suggestion": {"reason": "it is"}}
    found |= {"sweeps": [], "seconds": 1.0, "about": {"deciding": deciding}}
    (tmp_path / "lrlab").mkdir()
    (tmp_path / "lrlab" / "lr_finder.json").write_text(json.dumps(found))
    now = record | {"config": record["config"] | {"sharpening": "none", "sharpening_kwargs": kwargs}}
    assert saved_result.read_saved_result(tmp_path, record) == found
    assert saved_result.read_saved_result(tmp_path, now) == found
    for damage in ({"learning_rate": "fast"}, {"suggestion": []}):
        (tmp_path / "lrlab" / "lr_finder.json").write_text(json.dumps(found | damage))
        assert saved_result.read_saved_result(tmp_path, record) is None
    (tmp_path / "lrlab" / "lr_finder.json").write_text(json.dumps(found))
    other = record | {"config": record["config"] | {"sharpening": "min_snr"}}
    assert saved_result.read_saved_result(tmp_path, other) is None
