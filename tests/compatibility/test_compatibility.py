"""What users of version 0.1.0 have on disk, and what they type, goes on working: see make_fixtures.py."""

import importlib
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from make_fixtures import captured_parser, flags_of
from safetensors.torch import load_file

import diffusers_lrlab
from diffusers_lrlab.cli.main import main as lrlab

V1 = Path(__file__).parent / "fixtures" / "v1"
SCRIPTS = Path(diffusers_lrlab.__file__).parents[1] / "training_scripts"
OPTIONS = json.loads((V1 / "options.json").read_text())
FLAGS = json.loads((V1 / "help" / "flags.json").read_text())
pytestmark = pytest.mark.usefixtures("blank_pictures")
NAMES = {"arm", "dataset", "metric", "baseline", "between", "status"}  # strings that are not words for people


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder: a copy of all fixtures, where relative paths lead to what they led to then."""
    shutil.copytree(V1, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(command, *arguments):
    """The exit status of a script, or of `lrlab`, in this process."""
    # accelerate keeps one precision and accumulation for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        if command == "lrlab":
            return lrlab(list(map(str, arguments)))
        patch.setattr(sys, "argv", [str(SCRIPTS / command), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / command), run_name="__main__")
        return ended.value.code


def read(path):
    return json.loads(path.read_text())


def rows(folder):
    return list(map(json.loads, (folder / "lrlab" / "metrics.jsonl").read_text().splitlines()))


def assert_same_rows(found, expected):
    """The same updates; rates to 1e-12, everything else up to rounding. There may be more columns than then."""
    assert [row["update"] for row in found] == [row["update"] for row in expected]
    assert_same_figures(found, expected, rel=1e-4)
    for new, old in zip(found, expected, strict=True):
        assert new.get("lr", 0.0) == pytest.approx(old.get("lr", 0.0), rel=0, abs=1e-12)


def assert_same_figures(new, old, rel, place="", leave_out=()):
    """Everything in the old data is in the new, and numbers agree; there may be more of it, and words may be others."""
    if isinstance(old, dict):
        for key in old.keys() - {*leave_out}:
            assert key in new, f"{place}.{key}"
            assert_same_figures(new[key], old[key], rel, f"{place}.{key}", leave_out)
    elif isinstance(old, list):
        assert len(new) == len(old), place
        for index, (one, other) in enumerate(zip(new, old, strict=True)):
            assert_same_figures(one, other, rel, f"{place}[{index}]", leave_out)
    elif isinstance(old, (int, float)) and not isinstance(old, bool):
        assert new == pytest.approx(old, rel=rel, abs=1e-9), place
    elif not isinstance(old, str) or place.rpartition(".")[2] in NAMES:
        assert new == old, place


def assert_same_tensors(found, expected):
    found, expected = load_file(found), load_file(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_on_points_goes_on(home):
    """The sampler and the schedule follow the losses: their state must come from the checkpoint."""
    whole, folder = home / "points-run", home / "points-run-interrupted"
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-20"]
    resume = ("--output_dir", folder.name, "--resume_from_checkpoint", "latest")
    assert call("train_ddpm.py", *OPTIONS["points-run"], *resume) == 0
    assert_same_rows(rows(folder), rows(whole))
    assert len({row["lr"] for row in rows(whole) if "lr" in row}) > 1
    weights = "diffusion_pytorch_model.safetensors"
    for name in (f"denoiser/{weights}", f"checkpoint-40/denoiser/{weights}", f"checkpoint-40/denoiser_ema/{weights}"):
        assert_same_tensors(folder / name, whole / name)
    assert_same_tensors(folder / "checkpoint-40/timesteps.safetensors", whole / "checkpoint-40/timesteps.safetensors")
    new, old = (read(path / "lrlab" / "run.json") for path in (folder, whole))
    assert (new["run"]["status"], len(new["run"]["starts"])) == ("finished", 2)
    del old["train"]["results"]["training_set_loss"]  # which short runs have no more
    assert_same_figures(new["train"]["results"], old["train"]["results"], rel=1e-4)


def test_a_run_on_images_goes_on(home):
    whole, folder = home / "images-run", home / "images-run-interrupted"
    assert read(folder / "lrlab" / "run.json")["run"]["status"] == "cancelled"
    resume = ("--output_dir", folder.name, "--resume_from_checkpoint", "checkpoint-2")
    assert call("train_ddpm.py", *OPTIONS["images-run"], *resume) == 0
    assert_same_rows(rows(folder), rows(whole))
    assert read(folder / "lrlab" / "run.json")["run"]["status"] == "finished"


def test_a_run_is_reproduced_from_its_record(home):
    assert call("lrlab", "rerun", "points-run", "--compare", "--out", "again") == 0
    assert read(home / "again" / "lrlab" / "rerun.json")["agrees"]
    assert_same_rows(rows(home / "again"), rows(home / "points-run"))
    assert_same_tensors(*(home / run / "denoiser/diffusion_pytorch_model.safetensors" for run in ("again", "points-run")))


@pytest.mark.parametrize("name", sorted(path.stem for path in (V1 / "records").glob("*.json")))
def test_a_record_says_all_that_repeats_the_run(home, name):
    (home / name / "lrlab").mkdir(parents=True)
    shutil.copy(home / "records" / f"{name}.json", home / name / "lrlab" / "run.json")
    quick = ("--distance_samples", "0", "--num_validation_images", "8", "--eval_batch_size", "1", "--no_preflight")
    assert call("lrlab", "rerun", name, "--out", "again", *quick) == 0
    old, new = (read(home / folder / "lrlab" / "run.json") for folder in (name, "again"))
    changed = {"output_dir", "distance_samples", "num_validation_images", "eval_batch_size", "preflight"}
    assert {key: new["config"][key] for key in old["config"].keys() - changed} == {
        key: value for key, value in old["config"].items() if key not in changed
    }
    for fact in ("num_updates", "warmup_updates", "peak_learning_rate", "global_batch", "num_parameters"):
        assert new["train"][fact] == old["train"][fact]


@pytest.mark.parametrize("same", [True, False])
def test_the_finders_result_is_known_for_what_it_was_of(home, same):
    """A rate far from the one that the finder named is warned of, unless the finder tested something else."""
    found = read(home / "finder-result" / "lrlab" / "lr_finder.json")["learning_rate"]
    far = f"--learning_rate {found * 1000:g} --lr_scheduler constant --max_train_steps 2 --distance_samples 0".split()
    other = () if same else ("--ddpm_num_steps", "10")
    assert call("train_ddpm.py", *OPTIONS["finder-result"], *far, *other, "--output_dir", "finder-result") == 0
    warning = read(home / "finder-result" / "lrlab" / "run.json")["train"]["preflight"]["learning_rate"]
    assert (f"{found:g}" in warning.split()) == same


# --- studies ---------------------------------------------------------------------------------------------------------


def results(folder):
    """From the names of runs to their records."""
    return {path.stem: read(path) for path in sorted((folder / "runs").glob("*.json"))}


def moments(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("runs/*.json")}


def test_the_report_of_a_study_says_the_same(home):
    old = read(home / "study" / "summary.json")
    before = moments(home / "study")
    assert call("lrlab", "study", "report", "study") == 0
    assert_same_figures(read(home / "study" / "summary.json"), old, rel=1e-9, leave_out=("findings", "meta"))
    assert moments(home / "study") == before
    assert (home / "study" / "report" / "index.html").is_file()


@pytest.mark.parametrize(
    ("name", "options", "rel"),
    [
        ("study-interrupted", ("--stack_size", "4"), 1e-4),
        ("study-local-interrupted", ("--executor", "local"), 2e-3),  # other orders of summation than in stacks
    ],
)
def test_a_study_goes_on(home, name, options, rel):
    folder, begun = home / name, {}
    for log in folder.glob("local/*/lrlab/metrics.jsonl"):  # a mark by which the begun run is known to have gone on
        first, *others = log.read_text().splitlines()
        log.write_text("\n".join([json.dumps({**json.loads(first), "loss": 12.5}), *others, ""]))
        begun[log.parents[1].name] = 12.5
    started = {torch.load(file, weights_only=True)["started"] for file in folder.glob("stacks/*.pt")}
    done = moments(folder)
    assert 0 < len(done) < 8
    assert bool(begun) != bool(started)
    assert call("lrlab", "study", "run", "study.yaml", "--out", name, *options) == 0
    assert {file: moments(folder)[file] for file in done} == done
    new, old = results(folder), results(home / "study")
    assert new.keys() == old.keys()
    for run, record in old.items():
        assert_same_figures(new[run]["train"]["results"], record["train"]["results"], rel)
        assert new[run]["config"].items() >= record["config"].items()
        if run in begun:
            assert new[run]["curves"]["loss"]["loss"][0] == begun[run]
        elif f"{run}.json" not in done:
            assert new[run]["run"]["started"] in started
    assert len(read(folder / "summary.json")["rows"]) == len(read(home / "study" / "summary.json")["rows"])


# --- command lines ---------------------------------------------------------------------------------------------------


def parsers():
    """The flags of every command, as `flags.json` has them."""
    found = {}
    for name in ("train_ddpm", "find_lr", "run_study", "launch", "lrlab"):
        with captured_parser() as captured, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name])
            if name == "lrlab":
                lrlab(["list"])
            elif name == "launch":
                importlib.import_module("diffusers_lrlab.launch").main()
            else:
                runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        found |= flags_of(name, captured[0])
    return found


@pytest.fixture(scope="module")
def now():
    return parsers()


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_is_still_there(now, command):
    """With its default, and all that could be chosen; a command may have got commands of its own, which take its flags."""
    own = {name: flags for name, flags in now.items() if name == command or name.startswith(f"{command} ")}
    assert own
    for flag, old in FLAGS[command].items():
        if not flag.startswith("-") and len(own) > 1:
            continue  # a positional argument that became a command of its own
        found = [flags[flag] for flags in own.values() if flag in flags]
        assert found, flag
        for new in found:
            # As many as cores are left, which changes no result.
            default = None if flag.replace("-", "_") == "__dataloader_num_workers" else old["default"]
            assert (new["default"], new["nargs"], new["required"]) == (default, old["nargs"], old["required"]), flag
            if flag == "--logger":  # now whatever accelerate knows, and several
                continue
            assert set(new["choices"] or old["choices"] or ()) >= set(old["choices"] or ()), flag
            assert new["choices"] is None or old["choices"] is not None, flag
