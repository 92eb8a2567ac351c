"""Runs with settings in images: recorded, and resumed to the bit."""

import json
import shutil

import pytest
import runs
from continued_runs import SMALL, assert_same_end, load_state, new_run
from helpers import is_installed
from tables import cases

SPECS = {"adamw": "adamw:beta2_half_life=3000,tau=20000", "lion": "lion:tau=20000"}


@pytest.mark.slow
@cases("name", [name for name in SPECS if is_installed(name)])
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path, name):
    """After the checkpoint of update 5 of 10."""
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    (tmp_path / "model.json").write_text(json.dumps(SMALL))
    options = {"optimizer": SPECS[name], "ema": "half_life:images=200", "learning_rate": 1e-3}
    whole = new_run(tmp_path, "whole", "cosine", 10, **options)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoint-10")
    (killed / "model_index.json").unlink()
    resumed = new_run(tmp_path, "killed", "cosine", 10, **options, resume_from_checkpoint="latest")
    assert_same_end(whole, resumed, 10)
    record = runs.read_record(resumed)
    timescales, images = record["train"]["timescales"], record["train"]["global_batch"]
    groups = load_state(resumed / "checkpoint-10")["optimizer"]["param_groups"]
    if name != "lion":
        assert timescales["beta2_half_life"] == pytest.approx(3000)
        assert {group["betas"][1] for group in groups if "betas" in group} == {0.5 ** (images / 3000)}
    assert timescales["tau"] == pytest.approx(20000)
    assert [group["weight_decay"] for group in groups] == pytest.approx([images / (1e-3 * 20000)] * len(groups))
