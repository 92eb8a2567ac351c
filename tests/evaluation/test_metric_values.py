"""What registered metrics may return: numbers of any library become Python's, the rest is an error."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from registrations import restored
from tables import cases

import diffusers_lrlab.study.report.report as report
from diffusers_lrlab import register_metric, run_study
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.metrics import compare_samples, evaluate
from diffusers_lrlab.evaluation.registry import METRICS

POINTS = np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_stays():
    with restored(METRICS):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def register(name, value, **facts):
    METRICS.pop(name, None)
    facts = {"form": "points", "better": "neither", **facts}
    register_metric(name, description=f"returns {name}", source="a test", facts=facts)(lambda *_: value)


@cases("value, of, called", [
    (torch.ones(2), "samples", "The metric 'refused' must return a number, not a tensor of torch.float32 of shape (2,)"),
    ("0.5", "run", "must return a number or a dict of numbers, not the text '0.5'"),
    ({"refused": [1.0]}, "run", "must return a number as 'refused', not a list of 1"),
    ({"energy_distance": 0.0}, "run", "under names of its own, not under 'energy_distance'"),
    ({1: 0.0}, "run", "under names of its own, not under 1"),
])  # fmt: skip
def test_what_is_no_number_is_refused(value, of, called):
    register("refused", value, of=of)
    run, samples = SimpleNamespace(kind=SimpleNamespace(form="points")), (POINTS, POINTS)
    with pytest.raises(LabError) as error:
        evaluate(run, None, ["refused"]) if of == "run" else compare_samples(*samples, names=["refused"])
    assert called in str(error.value)
    assert "test_metric_values.py:" in str(error.value)


@cases("form, items", [("points", "points"), ("latents", "data")])
def test_the_score_of_held_out_data_is_named_after_the_kind_of_data(form, items):
    register("mine", 0.5, form=form)
    points = Batch(torch.from_numpy(POINTS))
    data = SimpleNamespace(num_images=len(POINTS), held_out=points, in_memory=points, known={})
    data.random_sample = lambda num, most: points
    run = SimpleNamespace(kind=SimpleNamespace(form=form), data=data, config=SimpleNamespace())
    assert evaluate(run, POINTS, names=["mine"]) == {"mine": 0.5, f"mine_of_held_out_{items}": 0.5}


def test_a_metric_of_runs_may_return_several_numbers():
    register("of_run", {"of_run": np.float32(0.5), "of_run_error": np.float32(0.25)}, of="run")
    run = SimpleNamespace(kind=SimpleNamespace(form="points"))
    assert evaluate(run, None, ["of_run"]) == {"of_run": 0.5, "of_run_error": 0.25}


def test_a_study_keeps_a_metric_that_is_nan_and_names_one_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda folder, *_: folder / "report" / "index.html")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    register("nan", math.nan)
    register("half", np.float32(0.5))
    base = {
        "max_train_steps": 2, "train_batch_size": 8, "num_validation_images": 16, "distance_samples": 16,
        "ddpm_num_steps": 10, "lr_warmup_steps": 0, "denoiser": "mlp:hidden_size=16,num_layers=1,embedding_size=8",
    }  # fmt: skip
    spec = {"base": base, "arms": {"constant": {}}, "datasets": ["dino"], "seeds": 2, "metrics": ["nan", "half"]}
    run_study(spec, tmp_path / "out", quiet=True)
    files = sorted((tmp_path / "out" / "runs").glob("*.json"))
    assert len(files) == 2
    for file in files:
        results = json.loads(file.read_text())["train"]["results"]
        assert (results["nan"], results["half"]) == (None, 0.5)
    register("refused", "0.5")
    with pytest.raises(LabError, match="The metric 'refused' must return a number, not the text '0.5'"):
        run_study({**spec, "metrics": ["refused"]}, tmp_path / "other", quiet=True)
    assert not list((tmp_path / "other" / "runs").glob("*.json"))
