"""What registered metrics may return: numbers of any library become Python's, everything else is an error with their name.

Through the end of a small training and of a small study, where a value that JSON cannot hold once cost a whole run.
"""

import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from tables import cases

import diffusers_lrlab.study.report.report as report
from diffusers_lrlab import register_metric
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import restored
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.evaluate import compare_samples, evaluate
from diffusers_lrlab.evaluation.registry import METRICS

POINTS = np.random.default_rng(0).standard_normal((16, 2)).astype(np.float32)
RUN = {
    "max_train_steps": 2,
    "train_batch_size": 8,
    "num_validation_images": 16,
    "distance_samples": 16,
    "ddpm_num_steps": 10,
    "lr_warmup_steps": 0,
}
HALF = np.float32(0.5)
# name -> what the metric returns; each is half
NUMBERS = {
    "float": 0.5,
    "float32": HALF,
    "float64": np.float64(0.5),
    "float16": np.float16(0.5),
    "norm": np.linalg.norm(np.array([0.3, 0.4], np.float32)),
    "fraction": Fraction(1, 2),
    "scalar_array": np.array(0.5),
    "array_of_one": np.array([0.5], np.float32),
    "matrix_of_one": np.array([[0.5]]),
    "tensor": torch.tensor(0.5),
    "tensor_of_one": torch.tensor([0.5]),
    "tensor_with_gradient": torch.tensor(0.5, requires_grad=True),
    "half_tensor": torch.tensor(0.5, dtype=torch.bfloat16),
}
WHOLE = {"int": 3, "int64": np.int64(3), "tensor_of_ints": torch.tensor(3), "array_of_ints": np.array([3], np.uint8)}
NOT_FINITE = {"nan": math.nan, "nan32": np.float32("nan"), "infinite": math.inf}
# name -> what the metric returns, and how the error calls it
REFUSED = {
    "none": (None, "None"),
    "text": ("0.5", "the text '0.5'"),
    "list": ([0.5], "a list of 1"),
    "tuple": ((0.5, 0.1), "a tuple of 2"),
    "dict": ({"refused": 0.5}, "a dict of 1"),
    "complex": (0.5 + 1j, "(0.5+1j)"),
    "complex64": (np.complex64(1j), "an array of complex64 of shape ()"),
    "bool": (True, "True"),
    "numpy_bool": (np.True_, "an array of bool of shape ()"),
    "two": (np.ones(2), "an array of float64 of shape (2,)"),
    "nothing": (np.ones(0), "an array of float64 of shape (0,)"),
    "two_in_a_tensor": (torch.ones(2), "a tensor of torch.float32 of shape (2,)"),
    "array_of_texts": (np.array(["0.5"]), "an array of <U3 of shape (1,)"),
    "object": (Path("."), "an object of pathlib."),
    "function": (math.sin, "an object of builtins.builtin_function_or_method"),
}
# The same of a metric of a run, which may give several figures.
REFUSED_OF_RUNS = {
    "text": ("0.5", "must return a number or a dict of numbers, not the text '0.5'"),
    "text_in_a_dict": (
        {"refused": 1.0, "refused_more": "0.5"},
        "must return a number as 'refused_more', not the text '0.5'",
    ),
    "list_in_a_dict": ({"refused": [1.0]}, "must return a number as 'refused', not a list of 1"),
    "name_of_another": ({"energy_distance": 0.0}, "under names of its own, not under 'energy_distance'"),
    "no_name": ({1: 0.0}, "under names of its own, not under 1"),
}


@pytest.fixture(autouse=True)
def nothing_stays():
    with restored(METRICS):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def register(name, value, **facts):
    METRICS.pop(name, None)
    facts = {"form": "points", "better": "neither", **facts}
    register_metric(name, description=f"returns {name}", source="a test", facts=facts)(lambda *_: value)


def train(folder, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    more = {"dataset_name": "dino", "output_dir": folder, "eval_batch_size": 16, "num_inference_steps": 2}
    tiny = "mlp:hidden_size=16,num_layers=1,embedding_size=8"
    given = {**RUN, **more, "denoiser": tiny, "cpu_threads": 1, **options}
    return main(["train", *(f"--{name}={value}" for name, value in given.items()), "--no_preflight"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of no metrics of anybody's own."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    assert train(folder) == 0
    return folder


@cases("name, value", [*NUMBERS.items(), *WHOLE.items(), *NOT_FINITE.items()])
def test_numbers_become_those_of_python(name, value):
    register("mine", value)
    found = compare_samples(POINTS, POINTS, names=["mine"])["mine"]
    assert type(found) is (int if name in WHOLE else float)
    if name in NOT_FINITE:
        assert not math.isfinite(found)
    else:
        assert found == (3 if name in WHOLE else 0.5)


@cases("form, items", [("points", "points"), ("latents", "data")])
def test_the_score_of_held_out_data_is_named_after_the_kind_of_data(form, items):
    register("mine", 0.5, form=form)
    points = Batch(torch.from_numpy(POINTS))
    data = SimpleNamespace(num_images=len(POINTS), held_out=points, in_memory=points, known={})
    data.random_sample = lambda num, most: points
    run = SimpleNamespace(kind=SimpleNamespace(form=form), data=data, config=SimpleNamespace())
    assert evaluate(run, POINTS, names=["mine"]) == {"mine": 0.5, f"mine_of_held_out_{items}": 0.5}


@cases("value, called", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(value, called):
    register("refused", value)
    with pytest.raises(LabError) as error:
        compare_samples(POINTS, POINTS, names=["refused"])
    assert str(error.value).startswith(f"The metric 'refused' must return a number, not {called}")
    assert "test_metric_values.py:" in str(error.value)


@pytest.mark.slow
def test_a_run_keeps_every_finite_number(finished, capsys):
    for name, value in (NUMBERS | WHOLE | NOT_FINITE).items():
        register(f"m_{name}", value)
    register("of_run", {"of_run": HALF, "of_run_error": np.float32(0.25)}, of="run")
    assert train(finished, resume_from_checkpoint="latest") == 0
    record = json.loads((finished / "lrlab" / "run.json").read_text())
    results = record["train"]["results"]
    assert record["run"]["status"] == "finished"
    assert {name: results[f"m_{name}"] for name in NUMBERS} == dict.fromkeys(NUMBERS, 0.5)
    assert {name: results[f"m_{name}_of_held_out_points"] for name in WHOLE} == dict.fromkeys(WHOLE, 3)
    assert (results["of_run"], results["of_run_error"]) == (0.5, 0.25)
    assert not results.keys() & {f"m_{name}" for name in NOT_FINITE}
    assert "the metric 'm_nan32' is nan, and is left out of the record" in capsys.readouterr().err


def fails(_):
    raise RuntimeError("no figure today")


@cases("value, called", REFUSED_OF_RUNS.values(), ids=REFUSED_OF_RUNS)
def test_a_metric_of_a_run_gives_numbers_by_name(value, called):
    register("refused", value, of="run")
    with pytest.raises(LabError) as error:
        evaluate(SimpleNamespace(kind=SimpleNamespace(form="points")), None, ["refused"])
    assert called in str(error.value)
    assert "test_metric_values.py:" in str(error.value)


@pytest.mark.slow
@cases("value, called, of", [(*REFUSED["text"], "samples"), (*REFUSED_OF_RUNS["list_in_a_dict"], "run")])
def test_a_run_names_the_metric_however_often_it_is_resumed(value, called, of, finished, capsys):
    register("refused", value, of=of)
    for _ in range(2):
        assert train(finished, resume_from_checkpoint="latest") == 2
        error = capsys.readouterr().err
        assert "error: The metric 'refused' must return" in error
        assert called in error
        run = json.loads((finished / "lrlab" / "run.json").read_text())["run"]
        assert run["status"] == "failed"
        assert "The metric 'refused' must return" in run["error"]


@pytest.mark.slow
def test_a_run_whose_metric_fails_says_where(finished, capsys):
    register_metric("refused", description="fails", source="a test", facts={"form": "points", "of": "run"})(fails)
    assert train(finished, resume_from_checkpoint="latest") == 2
    assert "The metric 'refused' failed at" in (error := capsys.readouterr().err)
    assert "test_metric_values.py:" in error
    assert "RuntimeError: no figure today" in error


def study(home, *metrics):
    """The exit status of a study of one run, with these metrics."""
    model = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1}
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(model))
    base = {**RUN, "model_config_name_or_path": "model", "learning_rate": 1e-3}
    arms = {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}}
    spec = {"title": "Of a test", "base": base, "arms": arms, "datasets": ["dino"], "seeds": 2, "metrics": [*metrics]}
    (home / "study.yaml").write_text(yaml.safe_dump(spec))
    return main(["study", "run", str(home / "study.yaml"), "--out", str(home / "out")])


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda folder, *_: folder / "report" / "index.html")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.mark.slow
def test_a_study_keeps_every_number(tmp_path, no_report):
    given = NUMBERS | WHOLE | {"nan": math.nan}
    for name, value in given.items():
        register(f"m_{name}", value)
    assert study(tmp_path, *(f"m_{name}" for name in given)) == 0
    files = sorted((tmp_path / "out" / "runs").glob("*.json"))
    assert len(files) == 4
    for file in files:
        record = json.loads(file.read_text())
        assert record["run"]["status"] == "finished"
        results = record["train"]["results"]
        assert {name: results[f"m_{name}"] for name in NUMBERS} == dict.fromkeys(NUMBERS, 0.5)
        assert {name: results[f"m_{name}"] for name in WHOLE} == dict.fromkeys(WHOLE, 3)
        assert results["m_nan"] is None


@cases("value, called", [REFUSED["text"], REFUSED["dict"]])
def test_a_study_names_the_metric(value, called, tmp_path, capsys, no_report):
    register("refused", value)
    assert study(tmp_path, "refused") == 2
    error = capsys.readouterr().err
    assert f"error: The metric 'refused' must return a number, not {called}" in error
    assert "test_metric_values.py:" in error
    assert not list((tmp_path / "out" / "runs").glob("*.json"))
