"""Runs and studies that version 0.1.0 wrote can be checked, resumed, repeated and reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from continued_runs import repeated_options
from tables import cases

from diffusers_lrlab import TrainingConfig, train
from diffusers_lrlab.cli.main import main

FIXTURE = Path(__file__).parent / "v0.1.0"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder: a copy of the fixture, where relative paths lead to what they led to then."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments):
    """The exit status of `lrlab` in this process, where accelerate keeps one precision and accumulation."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return main(list(map(str, arguments)))


def read(path):
    return json.loads(path.read_text())


def rows(folder):
    return list(map(json.loads, (folder / "lrlab" / "metrics.jsonl").read_text().splitlines()))


def assert_same(new, old, rel=1e-4, place=""):
    """All that is in the old data is in the new, and numbers agree up to rounding; words may be others."""
    if isinstance(old, dict):
        for key in old:
            assert key in new, f"{place}.{key}"
            assert_same(new[key], old[key], rel, f"{place}.{key}")
    elif isinstance(old, list):
        assert len(new) == len(old), place
        for index, (one, other) in enumerate(zip(new, old, strict=True)):
            assert_same(one, other, rel, f"{place}[{index}]")
    elif isinstance(old, (int, float)) and not isinstance(old, bool):
        assert new == pytest.approx(old, rel=rel, abs=1e-9), place
    elif not isinstance(old, str):
        assert new == old, place


@cases("folder", ["run", "study", "study-begun"])
def test_a_folder_is_whole(home, capsys, folder):
    assert call("check", folder) == 0
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.weekly
def test_a_run_is_reproduced_from_its_record(home):
    train(TrainingConfig(**repeated_options(home / "run") | {"output_dir": "again"}))
    assert_same(rows(home / "again"), rows(home / "run"))
    old, new = (read(home / folder / "lrlab" / "run.json")["config"] for folder in ("run", "again"))
    old = {name: value for name, value in old.items() if name in new or value}  # an option that has left was off
    assert {name: new[name] for name in old if name != "output_dir"} == {
        name: value for name, value in old.items() if name != "output_dir"
    }


def test_the_report_of_a_study_says_the_same(home):
    old, results = read(home / "study" / "summary.json"), sorted((home / "study" / "runs").iterdir())
    before = [file.read_bytes() for file in results]
    assert call("study", "report", "study") == 0
    new = read(home / "study" / "summary.json")
    for row in old["rows"]:
        del row["boot_low"], row["boot_high"]  # only the t interval has stayed
    assert_same(new["rows"], old["rows"], rel=1e-9)
    assert_same(new["power"], old["power"], rel=1e-9)
    assert [file.read_bytes() for file in results] == before


def test_a_study_goes_on(home):
    """A stack clips by the norm of the parameters' norms, as torch does; 0.1.0 took that of all numbers: other rounding."""
    folder = home / "study-begun"
    done = {file: file.stat().st_mtime_ns for file in (folder / "runs").iterdir()}
    (state,) = folder.glob("stacks/*/state.pt")
    started = torch.load(state, weights_only=True)["started"]
    assert call("study", "run", "study.yaml", "--out", "study-begun", "--stack_size", "2") == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    new, old = ({file.stem: read(file) for file in (home / name / "runs").iterdir()} for name in ("study-begun", "study"))
    assert new.keys() == old.keys()
    for name, record in old.items():
        is_done = folder / "runs" / f"{name}.json" in done
        assert_same(new[name]["train"]["results"], record["train"]["results"], **({} if is_done else {"rel": 5e-3}))
        assert is_done or new[name]["run"]["started"] == started
