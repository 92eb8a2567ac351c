"""Python printed in README and docs/ runs: whole where that is cheap, with training replaced by its checks elsewhere."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas
import printed
import pytest
import runs
import torch
from diffusers import DDPMScheduler
from tables import cases

import diffusers_lrlab
from diffusers_lrlab.hub import publish
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.resolve import resolve_config

BLOCKS = printed.blocks("python")
NEEDS_A_RUN = ("from_pretrained",)  # these are run by the slow test
NEEDS_A_FILE = ("@register_denoiser",)  # tests/models/test_denoisers.py has it in one
# Updates of an autoencoder that is then only saved, and images.
SHORTER = {"range(600)": "range(6)", "n=1000, s": "n=20, s"}


@pytest.fixture
def names():
    """What readers have in their scripts."""
    model = torch.nn.Linear(2, 2)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4),
        "noise_scheduler": DDPMScheduler(),
        "errors": torch.rand(16),
    }


@pytest.fixture
def without_training(monkeypatch):
    """Training, searches and uploads end after their checks."""

    class Found:
        lr = 1e-3

    def find_lr(config):
        resolve_config(config)
        return Found

    monkeypatch.setattr(diffusers_lrlab, "train", lambda config: resolve_config(config).output_dir, raising=False)
    monkeypatch.setattr(diffusers_lrlab, "find_lr", find_lr, raising=False)
    read = {"arm": ["a"], "dataset": ["dino"], "stage": ["compare"], "kl": [0.5]}
    read |= {f"{part}_seconds": [1.0] for part in ("training", "sampling", "evaluation")}
    monkeypatch.setattr(diffusers_lrlab, "run_study", lambda spec, out: expand(load_spec(spec)), raising=False)
    monkeypatch.setattr(diffusers_lrlab, "read_study", lambda folder: pandas.DataFrame(read), raising=False)
    for name in ("extend", "branch"):
        monkeypatch.setattr(diffusers_lrlab, name, inspect.signature(getattr(diffusers_lrlab, name)).bind, raising=False)
    monkeypatch.setattr(publish, "push_folder", lambda folder, target: target.repo_id)


@cases("block", BLOCKS, ids=str)
def test_imports_are_there(block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block}: {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != "gated":  # the reader's
                    importlib.import_module(alias.name)


def snippets():
    for block in BLOCKS:
        if not any(text in block.code for text in NEEDS_A_RUN + NEEDS_A_FILE):
            yield pytest.param(block, id=str(block))


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize("block", [*snippets()])
def test_a_snippet_runs(block, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = block.code
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    with printed.registrations_undone():
        exec(compile(code, str(block), "exec"), names)
    if "scheduler" in names:
        assert names["scheduler"].get_last_lr() == [0.0]
    if "lrs" in names:
        assert names["lrs"].max() == pytest.approx(1e-4)
    if "density" in names:
        assert names["timesteps"].shape == (16,)
        assert 0 < names["loss"] < 1
        assert names["density"].sum() == pytest.approx(1, abs=1e-12)


def test_the_schedule_of_ones_own_is_what_is_said(names):
    block = printed.block_with("def stairs", "python")
    with printed.registrations_undone():
        exec(compile(block.code, str(block), "exec"), names)
        from diffusers_lrlab import get_scheduler

        scheduler = get_scheduler("stairs:steps=2", names["optimizer"], num_warmup_steps=0, num_training_steps=10)
    assert len(set(np.round(names["lrs"][50:1000], 12))) == 4  # steps
    assert scheduler.get_last_lr() == [1e-4]


def test_the_change_of_diffusers_script_is_of_lines_that_it_has():
    """With `sampler.sample` in place of the lines that the page takes out; they are diffusers' own."""
    (diff,) = printed.blocks("diff")
    names = {
        "diffusers_lrlab": diffusers_lrlab,
        "noise_scheduler": DDPMScheduler(),
        "clean_images": torch.zeros(4, 1, 8, 8),
        **{"bsz": 4, "global_step": 0, "max_train_steps": 10, "torch": torch},
    }
    drawn = []
    for sign in "-+":
        torch.manual_seed(0)
        lines = [line[1:].removeprefix(" " * 12) for line in diff.code.splitlines() if line.startswith(sign)]
        exec(textwrap.dedent("\n".join(lines)), names)
        drawn.append(names["timesteps"])
    assert drawn[0].equal(drawn[1])


@pytest.mark.slow
@cases("data, name", [("digits", "ddpm-digits-8"), ("dino", "ddpm-dino")])
def test_a_pipeline_loads_as_printed(tmp_path, data, name):
    """After a run of the command above it, made short; figures of the snippet are made small."""
    short = runs.tiny_arguments(tmp_path)
    if data == "dino":
        short = ["--dataset_name=dino", "--distance_samples=100", "--ddpm_num_steps=20", "--no_preflight", "--cpu_threads=1"]
    runs.run(*short, "--max_train_steps=2", f"--output_dir={tmp_path}/{name}")
    code = printed.block_with(f'from_pretrained("{name}")', "python").code
    small = {
        "10_000": "100",
        "1_000_000": "100",
        "batch_size=16, num_inference_steps=100": "batch_size=2, num_inference_steps=2",
    }
    for printed_figure, small_figure in small.items():
        code = code.replace(printed_figure, small_figure)
    environment = {**runs.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
