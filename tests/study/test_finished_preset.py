"""A finished preset is recognised before torch is imported; anything else is gone through."""

import subprocess
import sys

import yaml
from runs import environment

import diffusers_lrlab.study.run as run_module
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study import shown_command

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
from pathlib import Path
from diffusers_lrlab.study import shown_command
shown_command.PRESETS_FOLDER = Path("presets")
from diffusers_lrlab.cli.main import main
status = main(["study", "run", "small", "--out", "out"])
heavy = {"torch", "diffusers", "transformers", "scipy"} & {*sys.modules}
sys.exit(f"imported {heavy}" if heavy else status)
"""


def goes_through(monkeypatch, *options):
    """Whether the runs of the study are looked at."""

    def refuse(*_, **__):
        raise LabError("gone through")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_study", refuse)
        return main(["study", "run", *options]) == 2


def test_a_finished_preset_is_recognised_until_something_changes(tmp_path, monkeypatch):
    (tmp_path / "presets").mkdir()
    preset = tmp_path / "presets" / "small.yaml"
    preset.write_text(text := yaml.safe_dump(SPEC))
    monkeypatch.setattr(shown_command, "PRESETS_FOLDER", preset.parent)
    monkeypatch.setattr("diffusers_lrlab.study.spec.reading.PRESETS_FOLDER", preset.parent)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "run", "small", "--out", "out"]) == 0
    asked = ("small", "--out", "out")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        "This study is finished. Its report: out/report/index.html",
    )
    assert not goes_through(monkeypatch, *asked)
    for option in (["--executor", "local"], ["--stack_size", "2"], ["--dataset_name", "moons"]):
        assert goes_through(monkeypatch, *asked, *option)
    preset.write_text(text + "\n")
    assert goes_through(monkeypatch, *asked)
    preset.write_text(text)
    for name in ("runs", "report/index.html", "spec.yaml", "summary.json", "manifest.json", "runs.parquet"):
        path = tmp_path / "out" / name
        path = next(path.glob("*.json")) if path.is_dir() else path
        kept = path.read_bytes()
        for damaged in (None, kept.replace(b"a", b"b")):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert goes_through(monkeypatch, *asked), name
            path.write_bytes(kept)
    assert not goes_through(monkeypatch, *asked)
