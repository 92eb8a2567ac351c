"""Python printed in README and docs/ runs: whole where that is cheap, with training replaced by its checks elsewhere."""

import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap

import huggingface_hub
import numpy as np
import pandas
import printed
import pyarrow
import pytest
import runs
import torch
from diffusers import DDPMScheduler
from helpers import image_folder
from pyarrow import parquet
from tables import cases

import diffusers_lrlab
from diffusers_lrlab.hub import transfer
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.resolve import resolve_config

BLOCKS = printed.blocks("python")
# Blocks that other tests run: the slow one below, tests/models/test_denoisers.py, and tests/pip_trainers.
ELSEWHERE = ("from_pretrained", "@register_denoiser", "import lightning")
IN_ORDER = {  # pages whose snippets go on from each other
    f"docs/tutorials/{name}.md" for name in ("own-metric", "paper-figure", "study-in-pandas", "trainer-and-lightning")
}
SHORTER = {  # updates, and images
    "range(600)": "range(6)",
    "n=1000, s": "n=20, s",
    "max_steps=100": "max_steps=4",
    ", num_proc=4": "",
    "    warmup_steps=10": "    warmup_steps=1",
}


def execute(block, names):
    """Runs a snippet with fewer updates and images."""
    code = functools.reduce(lambda text, each: text.replace(*each), SHORTER.items(), block.code)
    exec(compile(code, str(block), "exec"), names)


@pytest.fixture
def names():
    """What readers have in their scripts."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return {"model": model, "optimizer": optimizer, "noise_scheduler": DDPMScheduler(), "errors": torch.rand(16)}


@pytest.fixture
def without_training(monkeypatch):
    """Training, searches and uploads end after their checks."""

    class Found:
        lr = 1e-3

    def find_lr(config):
        resolve_config(config)
        return Found

    read = {"arm": ["a"], "dataset": ["dino"], "stage": ["compare"], "kl": [0.5]}
    read |= {f"{part}_seconds": [1.0] for part in ("training", "sampling", "evaluation")}
    replaced = {
        "train": lambda config: resolve_config(config).output_dir,
        "find_lr": find_lr,
        "run_study": lambda spec, out: expand(load_spec(spec)),
        "read_study": lambda folder: pandas.DataFrame(read),
        "extend": inspect.signature(diffusers_lrlab.extend).bind,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(diffusers_lrlab, name, function, raising=False)
    monkeypatch.setattr(transfer, "push_folder", lambda folder, target: target.repo_id)
    monkeypatch.setattr(huggingface_hub, "metadata_update", inspect.signature(huggingface_hub.metadata_update).bind)


def snippets():
    for block in BLOCKS:
        if block.page not in IN_ORDER and not any(text in block.code for text in ELSEWHERE):
            yield pytest.param(block, id=str(block))


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize("block", [*snippets()])
def test_a_snippet_runs(block, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "photos" in block.code:  # the reader's
        image_folder(tmp_path / "photos")
    with printed.registrations_undone():
        execute(block, names)
    if "scheduler" in names:
        assert names["scheduler"].get_last_lr() == [0.0]
    if "lrs" in names:
        assert names["lrs"].max() == pytest.approx(1e-4)
    if "density" in names:
        assert names["timesteps"].shape == (16,)
        assert 0 < names["loss"] < 1
        assert names["density"].sum() == pytest.approx(1, abs=1e-12)
    if "def stairs" in block.code:
        assert len(set(np.round(names["lrs"][50:1000], 12))) == 4  # steps


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """Studies by the names of those pages: a published one, with their arms and data sets."""
    card = printed.ROOT / "model_cards/linear-to-zero-2d"
    names = {"cosine-tenth": "constant", "dino@400": "dino", "moons@400": "moons"}
    (tmp_path / "first-study").mkdir()
    for name in ("runs.parquet", "summary.parquet"):
        table = parquet.read_table(card / name)
        rows = table.to_pandas().replace({"arm": names, "dataset": names})
        rows = rows[rows.dataset.isin(["dino", "moons"]) & (rows.arm != "linear")]
        rows = pyarrow.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(table.schema.metadata)
        parquet.write_table(rows, tmp_path / "first-study" / name)
    (tmp_path / "schedules").symlink_to("first-study")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("studies")
@pytest.mark.filterwarnings("ignore:'pin_memory'")  # which Trainer asks for on a CPU, too
@pytest.mark.parametrize("page", sorted(IN_ORDER))
def test_the_snippets_of_a_page_run_in_order(page, capsys, tmp_path):
    names = {}
    with printed.registrations_undone():
        for block in BLOCKS:
            if block.page == page and "import lightning" not in block.code:
                execute(block, names)
    out, text = capsys.readouterr().out, (printed.ROOT / page).read_text(encoding="utf-8")
    if page.endswith("study-in-pandas.md"):
        shown = re.search(r"^```\n( +mean.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
        first = [[re.sub(r"[\d.]+", "", line).split() for line in each.splitlines()[:8]] for each in (out, shown)]
        assert first[0] == first[1]  # all but the numbers
        assert out.splitlines()[-1].endswith("runs of constant, cosine, wsd")
    elif page.endswith("own-metric.md"):
        assert out.strip() in text
    elif page.endswith("paper-figure.md"):
        assert (tmp_path / "losses.pdf").exists()
    else:
        assert names["trainer"].lr_scheduler.get_last_lr() == [0.0, 0.0]


def test_the_change_of_diffusers_script_is_of_lines_that_it_has():
    """With `sampler.sample` in place of the lines that the page takes out; they are diffusers' own."""
    (diff,) = printed.blocks("diff")
    names = {"diffusers_lrlab": diffusers_lrlab, "noise_scheduler": DDPMScheduler(), "torch": torch}
    names |= {"clean_images": torch.zeros(4, 1, 8, 8), "bsz": 4, "global_step": 0, "max_train_steps": 10}
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
        short = ["--dataset_name=dino", "--distance_samples=100", "--ddpm_num_steps=20", "--no_preflight"]
    runs.run(*short, "--max_train_steps=2", f"--output_dir={tmp_path}/{name}")
    code = printed.block_with(f'from_pretrained("{name}")', "python").code
    small = {"10_000": "100", "1_000_000": "100"}
    small["batch_size=16, num_inference_steps=100"] = "batch_size=2, num_inference_steps=2"
    code = functools.reduce(lambda text, each: text.replace(*each), small.items(), code)
    environment = {**runs.environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
