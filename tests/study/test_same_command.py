"""A finished study is known again by its command, before anything heavy is imported; anything else is looked at in full."""

import shutil
import subprocess
import sys

import pytest
import yaml
from accelerate.state import AcceleratorState
from runs import environment

import diffusers_lrlab.study.run as run_module
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.shown_command import source_sum

SPEC = {
    "base": {"max_train_steps": 4, "train_batch_size": 8, "num_validation_images": 20, "distance_samples": 20},
    "arms": {"constant": {"lr_scheduler": "constant"}},
    "datasets": ["dino"],
    "seeds": 1,
    "metrics": ["validation_loss_ema"],
    "evaluation_points": 1,
}
WITHOUT_TORCH = """
import sys
from diffusers_lrlab.cli.main import main
status = main(sys.argv[1:])
heavy = {"torch", "diffusers", "transformers", "scipy"} & {*sys.modules}
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study with its specification."""
    home = tmp_path_factory.mktemp("finished")
    (home / "study.yaml").write_text(yaml.safe_dump(SPEC))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["study", "run", "study.yaml", "--out", "out"]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return home


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def looks_again(monkeypatch, *options):
    """Whether the study is gone through."""

    def refuse(*_, **__):
        raise LabError("gone through")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_study", refuse)
        return main(["study", "run", *options]) == 2


@pytest.mark.slow
def test_the_same_command_imports_nothing_heavy(home):
    command = [sys.executable, "-c", WITHOUT_TORCH, "study", "run", "study.yaml", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert (done.returncode, "This study is finished" in done.stdout) == (0, True), done.stderr
    assert "out/report/index.html" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--executor", "local"], ["--stack_size", "2"], ["--precision", "tf32"], ["--address", "auto"]]
)
def test_another_command_is_looked_at(home, monkeypatch, options):
    assert not looks_again(monkeypatch, "study.yaml", "--out", "out")
    assert looks_again(monkeypatch, "study.yaml", "--out", "out", *options)


@pytest.mark.parametrize("part", ["runs", "weights", "report", "spec.yaml", "summary.json", "manifest.json", "runs.parquet"])
@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_damage_is_looked_at(home, monkeypatch, part, damage):
    path = home / "out" / part
    path = max(path.iterdir(), key=lambda file: file.stat().st_size if file.is_file() else 0) if path.is_dir() else path
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    assert looks_again(monkeypatch, "study.yaml", "--out", "out")


def test_a_file_beside_one_of_its_name_is_read_itself(tmp_path):
    for name in ("quick", "spec", "spec.yaml"):
        (tmp_path / name).write_text(name)
    sums = [source_sum(tmp_path / name) for name in ("quick", "spec", "spec.yaml")]
    assert len({*sums, source_sum("quick")}) == 4


def test_another_text_is_looked_at(home, monkeypatch):
    (home / "study.yaml").write_text(yaml.safe_dump(SPEC | {"seeds": 2}))
    assert looks_again(monkeypatch, "study.yaml", "--out", "out")


@pytest.mark.slow
def test_what_a_text_alone_does_not_decide_is_looked_at(home, monkeypatch):
    (home / "plugin.py").write_text("")
    (home / "plugged.yaml").write_text(yaml.safe_dump(SPEC | {"base": SPEC["base"] | {"plugins": "plugin.py"}}))
    assert main(["study", "run", "plugged.yaml", "--out", "plugged"]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    assert looks_again(monkeypatch, "plugged.yaml", "--out", "plugged")
