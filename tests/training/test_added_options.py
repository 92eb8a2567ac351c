"""Records of version 0.1.0 can be read by versions with more options."""

import json
from dataclasses import dataclass
from pathlib import Path

from diffusers_lrlab.core.options import DRAWS, option
from diffusers_lrlab.finder import result as saved_result
from diffusers_lrlab.hub.card import write_model_card
from diffusers_lrlab.training import config, resolve
from diffusers_lrlab.training.config import TrainingConfig

RUN = Path(__file__).parents[1] / "compatibility" / "v0.1.0" / "run"


@dataclass(frozen=True, kw_only=True)
class WiderConfig(TrainingConfig):
    sharpening: str = option("none", "Made up.", DRAWS, registry="timesteps.registries:LOSS_WEIGHTINGS")
    sharpening_kwargs: dict | None = option(None, "Its parameters.", DRAWS)


def test_an_older_record_is_described_in_a_card_and_compared_with_the_finders_result(tmp_path, monkeypatch):
    record = json.loads((RUN / "lrlab" / "run.json").read_text())
    record["meta"]["git_dirty"] = None  # git did not answer in time
    train, file = record["train"], tmp_path / "lrlab" / "lr_finder.json"
    deciding = saved_result.deciding(record["config"], train["num_parameters"], train["global_batch"])
    for module in (config, saved_result, resolve):
        monkeypatch.setattr(module, "TrainingConfig", WiderConfig)
    monkeypatch.setattr(resolve, "LEARNED_FROM", (*resolve.LEARNED_FROM, "sharpening"))
    write_model_card(tmp_path, record)
    assert "`none`" in (tmp_path / "README.md").read_text()
    assert resolve.describe_choices(record["config"])[-1] == ("sharpening", "none")
    found = {"learning_rate": 1e-3, "suggestion": {"reason": "it is"}}
    found |= {"sweeps": [], "seconds": 1.0, "about": {"deciding": deciding}}
    file.parent.mkdir(exist_ok=True)
    for damage in ({"learning_rate": "fast"}, {"suggestion": []}):
        file.write_text(json.dumps(found | damage))
        assert saved_result.read_saved_result(tmp_path, record) is None
    file.write_text(json.dumps(found))
    for options in ({}, {"sharpening": "none", "sharpening_kwargs": None}, {"sharpening": "none", "sharpening_kwargs": {}}):
        assert saved_result.read_saved_result(tmp_path, record | {"config": record["config"] | options}) == found
    other = record | {"config": record["config"] | {"sharpening": "min_snr"}}
    assert saved_result.read_saved_result(tmp_path, other) is None
