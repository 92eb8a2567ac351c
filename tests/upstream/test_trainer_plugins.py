"""`lrlab plugin`: plug-ins of other trainers, which import this package."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from schedule_rows import close, run

from diffusers_lrlab import lr_curve
from diffusers_lrlab.cli.main import main

AI_TOOLKIT = os.environ.get("AI_TOOLKIT")
N = 24


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "scheduler.py").touch()
    (tmp_path / "extensions").mkdir()
    return tmp_path


def test_the_plugin_is_an_extension(folder, monkeypatch, capsys):
    """ai-toolkit imports the packages in `extensions` and reads their lists of extensions."""
    for _ in range(2):
        assert main(["plugin", "ai-toolkit", str(folder)]) == 0
    assert str(folder / "extensions" / "diffusers_lrlab" / "__init__.py") in capsys.readouterr().out
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("extensions.diffusers_lrlab")
    assert module.AI_TOOLKIT_EXTENSIONS == []
    assert module.diffusers_lrlab is sys.modules["diffusers_lrlab"]
    for name in ("extensions", "extensions.diffusers_lrlab"):
        monkeypatch.delitem(sys.modules, name)


def test_other_folders_and_trainers_are_refused(folder, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    assert main(["plugin", "ai-toolkit", str(other)]) == 2
    assert "must be the folder of ai-toolkit" in capsys.readouterr().err
    assert main(["plugin", "kohya", str(folder)]) == 2
    assert "NAME='kohya': must be one of ai-toolkit, got 'kohya'" in capsys.readouterr().err
    path = folder / "extensions" / "diffusers_lrlab" / "__init__.py"
    path.parent.mkdir()
    path.write_text("mine")
    assert main(["plugin", "ai-toolkit", str(folder)]) == 2
    assert "exists and is another file" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.skipif(AI_TOOLKIT is None, reason="set AI_TOOLKIT to a checkout of ai-toolkit")
@pytest.mark.parametrize("name", ["rex:d=0.9", "wsd:decay_type=1-sqrt", "mdlrc", "step:gamma=0.5,step_size=5"])
def test_ai_toolkit_makes_the_schedule(name, monkeypatch):
    """By its own function, with the arguments of its training process; resumed by `step(n)`."""
    spec = importlib.util.spec_from_file_location("scheduler", Path(AI_TOOLKIT) / "toolkit" / "scheduler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for done in (0, 10):
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-3)
        scheduler = module.get_lr_scheduler(name, optimizer, total_iters=N, num_warmup_steps=4)
        if done:
            with pytest.warns(UserWarning, match="lr_scheduler.step()|epoch parameter"):
                scheduler.step(done)
        close(run(scheduler, optimizer, N - done)[:, 0, 0], lr_curve(name, 1e-3, 4, N)[done:])
