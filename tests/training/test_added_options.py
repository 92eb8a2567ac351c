"""Records from before an option existed can be read: it had its default."""

import json
from pathlib import Path

from diffusers_lrlab.finder.result import deciding, read_saved_result
from diffusers_lrlab.hub.card import write_model_card
from diffusers_lrlab.training.resolve import describe_choices

RUN = Path(__file__).parents[1] / "compatibility" / "v0.1.0" / "run"


def test_an_older_record_is_described_in_a_card_and_compared_with_the_finders_result(tmp_path):
    record = json.loads((RUN / "lrlab" / "run.json").read_text())
    record["meta"]["git_dirty"] = None  # git did not answer in time
    config, train = record["config"], record["train"]
    older = record | {"config": {name: value for name, value in config.items() if name not in ("noise", "noise_kwargs")}}
    write_model_card(tmp_path, older)
    assert "`gaussian`" in (tmp_path / "README.md").read_text()
    assert ("noise", "gaussian") in describe_choices(older["config"])
    about = {"deciding": deciding(older["config"], train["num_parameters"], train["global_batch"])}
    found = {"learning_rate": 1e-3, "suggestion": {"reason": "it is"}, "sweeps": [], "seconds": 1.0, "about": about}
    (tmp_path / "lrlab").mkdir()
    for damage in ({}, {"learning_rate": "fast"}, {"suggestion": []}):
        (tmp_path / "lrlab" / "lr_finder.json").write_text(json.dumps(found | damage))
        assert (read_saved_result(tmp_path, record) is None) == bool(damage)
    (tmp_path / "lrlab" / "lr_finder.json").write_text(json.dumps(found))
    assert read_saved_result(tmp_path, record | {"config": config | {"noise_kwargs": None}}) == found
    assert read_saved_result(tmp_path, record | {"config": config | {"noise": "offset"}}) is None
