"""What users of version 0.1.0 have on disk, and what they type, goes on working: see make_fixture.py."""

import json
import shutil

import pytest
import torch
from continued_runs import repeated_options
from make_fixture import FIXTURE, all_flags, call
from safetensors.torch import load_file
from tables import cases

from diffusers_lrlab import TrainingConfig, train

FLAGS = json.loads((FIXTURE / "flags.json").read_text())
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder: a copy of the fixture, where relative paths lead to what they led to then."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def assert_same_tensors(found, expected):
    found, expected = load_file(found), load_file(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@cases("folder", ["run", "study", "study-begun"])
def test_a_folder_is_whole(home, capsys, folder):
    assert call("check", folder) == 0
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.slow
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
    assert_same(new["rows"], old["rows"], rel=1e-9)
    assert_same(new["ranks"], old["ranks"], rel=1e-9)
    assert [file.read_bytes() for file in results] == before


def test_a_study_goes_on(home):
    folder = home / "study-begun"
    done = {file: file.stat().st_mtime_ns for file in (folder / "runs").iterdir()}
    (state,) = folder.glob("stacks/*/state.pt")
    started = torch.load(state, weights_only=True)["started"]
    assert call("study", "run", "study.yaml", "--out", "study-begun", "--stack_size", "2") == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done
    new, old = ({file.stem: read(file) for file in (home / name / "runs").iterdir()} for name in ("study-begun", "study"))
    assert new.keys() == old.keys()
    for name, record in old.items():
        assert_same(new[name]["train"]["results"], record["train"]["results"])
        assert folder / "runs" / f"{name}.json" in done or new[name]["run"]["started"] == started


@pytest.fixture(scope="module")
def now():
    return all_flags()


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_is_still_there(now, command):
    """With its default, and all that could be chosen."""
    for flag, (default, nargs, choices) in FLAGS[command].items():
        assert flag in now[command]
        new_default, new_nargs, new_choices = now[command][flag]
        may_be_left_out = not flag.startswith("-") and (nargs, new_nargs) == (None, "?")
        assert new_default == default, flag
        assert new_nargs == nargs or may_be_left_out, flag
        assert new_choices is None or {*new_choices} >= {*(choices or new_choices)}, flag
