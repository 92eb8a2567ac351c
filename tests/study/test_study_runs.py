"""Small studies from beginning to end: what they write, that they go on after anything, and what they refuse."""

import base64
import contextlib
import copy
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler
from PIL import Image
from pyarrow import parquet
from runs import TINY_UNET, environment
from started import Started
from tables import cases

import diffusers_lrlab as lab
import diffusers_lrlab.study.report.report as report
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core import plugins
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batch import Batch
from diffusers_lrlab.evaluation.landscape import barrier, curvature, losses_between, sharpness
from diffusers_lrlab.evaluation.validation_loss import ValidationLoss
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.objective.ddpm import DDPM
from diffusers_lrlab.study import forecast
from diffusers_lrlab.study.analysis.consistency import consistency
from diffusers_lrlab.study.analysis.runs_table import read_runs, write_runs
from diffusers_lrlab.study.run import run_study
from diffusers_lrlab.study.runs import measure
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import RunResult, StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec, preset_names, spec_from_dict
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.training.config import TrainingConfig
from diffusers_lrlab.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("blank_pictures")
DRIVER = Path(__file__).parents[1] / "scripts" / "study_driver.py"
TINY = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1}
BASE = {
    "model_config_name_or_path": "tiny",
    "max_train_steps": 30,
    "train_batch_size": 16,
    "num_validation_images": 200,
    "distance_samples": 200,
    "ddpm_num_steps": 10,
    "lr_warmup_steps": 0,
    "learning_rate": 1e-3,
    "checkpointing_steps": 10,
}
SPEC = {
    "title": "Of a test",
    "base": BASE,
    "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine", "description": "half a cosine"}},
    "datasets": ["dino", "moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
    "evaluation_points": 3,
}
ONE = {"datasets": ["dino"], "seeds": 1}
HOT = {"lr_scheduler": "constant", "learning_rate": 1e30}  # diverges at once
write_report = report.write_report


@pytest.fixture(scope="module", autouse=True)
def bare():
    """One thread, and no pictures where they are not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.setattr(report, "write_report", lambda folder, *_: folder / "report" / "index.html")
        yield patch


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the tiny model is."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    return folder


def write_spec(home, **changes):
    """The file of the small study, with other keys."""
    text = yaml.safe_dump({key: value for key, value in {**SPEC, **changes}.items() if value is not None}, sort_keys=False)
    path = home / "study.yaml"
    path.write_text(text)
    return path


def study(home, out, *options, status=0, **changes):
    """Runs a study by its command, in this process."""
    assert main(["study", "run", str(write_spec(home, **changes)), f"--out={out}", *options]) == status
    AcceleratorState._reset_state(reset_partial_state=True)
    return out


def records(folder):
    """The results, by file name; none of them holds a number that is not JSON's."""

    def refuse(text):
        raise AssertionError(text)

    files = sorted((folder / "runs").glob("[!.]*.json"))  # not what a killed process was writing
    return {file.stem: json.loads(file.read_text(), parse_constant=refuse) for file in files}


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


def contents(folder):
    """Every file of the runs with its bytes."""
    files = [*folder.glob("runs/[!.]*"), *folder.glob("weights/[!.]*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


def moments(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in contents(folder)}


_TIMES = {"started", "ended", "hours", "seconds", "training_seconds", "sampling_seconds", "evaluation_seconds"}
_TIMES |= {"sha256"}  # of all of a record, and so of these


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in _TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same_but_for_times(one, other):
    """The same files, to the byte; those that hold times without these."""
    first, second = contents(one), contents(other)
    assert list(first) == list(second)
    for name in first:
        if name.endswith(".json"):
            texts = [json.dumps(without_times(json.loads(files[name]))) for files in (first, second)]
            assert texts[0] == texts[1], name
        else:
            assert first[name] == second[name], name
    summaries = [without_times(read_summary(folder)) for folder in (one, other)]
    for summary in summaries:
        del summary["study"]["command"]
    assert summaries[0] == summaries[1]


@pytest.fixture(scope="module")
def stacked(home):
    return study(home, home / "stacked", "--executor=stacked", speedup_metric="validation_loss_ema")


@pytest.fixture(scope="module")
def local(home):
    return study(home, home / "local", "--executor=local", speedup_metric="validation_loss_ema")


@pytest.fixture
def done(stacked, tmp_path):
    """A finished study of one's own."""
    return shutil.copytree(stacked, tmp_path / "done")


# --- what a study writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["stacked", pytest.param("local", marks=pytest.mark.slow)])
def test_the_file_of_a_run(request, executor):
    folder = request.getfixturevalue(executor)
    runs = records(folder)
    assert len(runs) == 8
    assert {(r["run"]["arm"], r["run"]["dataset"], r["run"]["seed"]) for r in runs.values()} == {
        (arm, dataset, seed) for arm in SPEC["arms"] for dataset in SPEC["datasets"] for seed in (0, 1)
    }
    for name, record in runs.items():
        assert {"run", "train", "curves", "samples", "config", "meta"} <= set(record)
        run, train = record["run"], record["train"]
        assert run["id"] == name
        assert name.startswith(f"{run['arm']}--{run['dataset']}--{run['seed']}--")
        assert (run["stage"], run["status"], run["error"], run["learning_rate"]) == ("compare", "finished", None, 1e-3)
        assert run["executor"]["name"] == executor
        assert run["started"] <= run["ended"]
        assert (train["num_updates"], train["updates_done"]) == (30, 30)
        assert train["num_parameters"] == sum(p.numel() for p in MLPDenoiser.from_config(TINY).parameters())
        assert min(train[f"{part}_seconds"] for part in ("training", "sampling", "evaluation")) > 0
        assert {"energy_distance", "validation_loss_ema"} <= set(train["results"])
        assert train["results"]["energy_distance"] > train["results"]["energy_distance_of_held_out_points"]
        assert "kl" not in train["results"]
        loss, quality = record["curves"]["loss"], record["curves"]["quality"]
        assert loss["update"] == [9, 19, 29]
        assert len(loss["loss"]) == len(loss["lr"]) == 3
        assert quality["update"] == [10, 20, 30]
        assert quality["validation_loss_ema"][-1] == train["results"]["validation_loss_ema"]
        assert np.shape(record["samples"]["points"]) == (200, 2)
        assert np.array_equal(record["samples"]["points"], np.round(record["samples"]["points"], 4))
        assert set(TrainingConfig().to_dict()) - set(record["config"]) == {"output_dir"}
        assert record["config"]["seed"] == run["seed"]
        assert "torch" in json.dumps(record["meta"])
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} <= {
        *("runs", "weights", "spec.yaml", "summary.json", "summary.parquet", "runs.parquet", "manifest.json"),
    }
    assert not [*folder.rglob(".tmp*"), *folder.glob("stacks/*"), *folder.glob("local/*")]


def test_stacked_and_local_agree(stacked, local):
    ours, twins = records(stacked), records(local)
    assert list(ours) == list(twins)
    for name, one in ours.items():
        other = twins[name]
        assert one["train"]["results"] == pytest.approx(other["train"]["results"], rel=1e-3)
        for curve in ("loss", "quality"):
            for column, values in one["curves"][curve].items():
                assert values == pytest.approx(other["curves"][curve][column], rel=1e-4), (name, column)
        np.testing.assert_allclose(one["samples"]["points"], other["samples"]["points"], atol=2e-3)
        np.testing.assert_allclose(one["fixed_start"]["points"], other["fixed_start"]["points"], atol=2e-3)
        assert one["config"] == other["config"]


def test_common_random_numbers(stacked):
    """Arms of one seed start with the same weights and see the same points, so that their first losses are the same."""
    first = {}
    for record in records(stacked).values():
        run = record["run"]
        first.setdefault((run["dataset"], run["seed"]), set()).add(record["curves"]["loss"]["loss"][0])
    assert all(max(losses) - min(losses) < 0.01 * max(losses) for losses in first.values())
    assert len({round(max(losses), 6) for losses in first.values()}) == 4


def test_summary_and_parquet_agree(stacked):
    summary = read_summary(stacked)
    rows = parquet.read_table(stacked / "summary.parquet").to_pylist()
    assert len(rows) == len(summary["rows"]) == 2 * 2 * 2
    for row, other in zip(summary["rows"], rows, strict=True):
        assert {**row, "seeds_needed": json.dumps(row["seeds_needed"])} == other
        assert not any(isinstance(value, float) and math.isnan(value) for value in other.values())
    assert summary["study"]["runs"] == {"finished": 8, "diverged": 0}
    assert summary["study"]["arms"]["cosine"]["description"] == "half a cosine"
    assert summary["study"]["command"] == "lrlab study run study.yaml --out stacked --executor stacked"
    seconds = sum(
        record["train"][f"{part}_seconds"]
        for record in records(stacked).values()
        for part in ("training", "sampling", "evaluation")
    )
    assert summary["study"]["hours"] == pytest.approx(seconds / 3600)


def test_the_rows_are_of_the_files(stacked):
    values = {}
    for record in records(stacked).values():
        run = record["run"]
        values.setdefault((run["arm"], run["dataset"]), []).append(record["train"]["results"]["energy_distance"])
    floors = {record["run"]["dataset"]: record["train"]["results"] for record in records(stacked).values()}
    for row in read_summary(stacked)["rows"]:
        if row["metric"] != "energy_distance":
            continue
        own, baseline = values[row["arm"], row["dataset"]], values["constant", row["dataset"]]
        assert (row["n"], row["diverged"]) == (2, 0)
        assert row["mean"] == pytest.approx(np.mean(own))
        assert row["std"] == pytest.approx(np.std(own, ddof=1))
        assert row["floor"] == floors[row["dataset"]]["energy_distance_of_held_out_points"]
        if row["arm"] == "constant":
            assert row["diff"] is None
            assert row["p"] is None
        else:
            assert row["diff"] == pytest.approx(np.mean(np.subtract(own, baseline)))


def test_speedups(stacked):
    rows = {(row["arm"], row["dataset"]): row for row in read_summary(stacked)["speedups"]}
    assert set(rows) == {(arm, dataset) for arm in SPEC["arms"] for dataset in SPEC["datasets"]}
    for (arm, _), row in rows.items():
        assert row["n"] == 2
        assert (row["speedup"] is None) == (arm == "constant")
    assert "speedup" in read_summary(stacked)["findings"]


@pytest.mark.slow
def test_controls_are_compared_besides(home, tmp_path):
    """Arms beside their controls, in a family of their own: nothing about the baseline changes by it."""
    arms = {**SPEC["arms"], "linear": {"lr_scheduler": "linear"}}
    with_controls = {**arms, "linear": {"lr_scheduler": "linear", "controls": ["cosine"]}}
    few = {"datasets": ["dino", "moons"], "speedup_metric": "validation_loss_ema"}
    out = study(home, tmp_path / "out", arms=arms, **few)
    plain, before = read_summary(out), moments(out)
    study(home, out, arms=with_controls, **few)
    summary = read_summary(out)
    assert moments(out) == before
    assert "controls" not in plain
    assert [summary[key] for key in ("rows", "ranks", "speedups")] == [plain[key] for key in ("rows", "ranks", "speedups")]
    values = {}
    for record in records(out).values():
        run = record["run"]
        values[run["arm"], run["dataset"], run["seed"]] = record["train"]["results"]["energy_distance"]
    rows = summary["controls"]["energy_distance"]
    assert [(row["arm"], row["control"], row["dataset"]) for row in rows] == [
        ("linear", "cosine", "dino"),
        ("linear", "cosine", "moons"),
    ]
    for row in rows:
        seeds = [values["linear", row["dataset"], seed] - values["cosine", row["dataset"], seed] for seed in (0, 1)]
        assert row["diff"] == pytest.approx(np.mean(seeds))
    # Holm over two: the smaller p counts twice, and the other at least as much.
    first, second = sorted(rows, key=lambda row: row["p"])
    assert first["p_adjusted"] == pytest.approx(min(1, 2 * first["p"]))
    assert second["p_adjusted"] == pytest.approx(max(first["p_adjusted"], second["p"]))
    assert [row["control"] for row in summary["controls"]["speedup"]] == ["cosine", "cosine"]
    for metric, verdicts in summary["findings"].items():
        own = [verdict for verdict in verdicts if verdict not in plain["findings"][metric]]
        assert [(verdict["arm"], verdict["reference"]) for verdict in own] == [("linear", "cosine")] * 2


def test_seeds_make_much_the_same_of_one_noise(stacked):
    rows = read_summary(stacked)["consistency"]
    assert {(row["dataset"], row["between"]) for row in rows} == {
        (dataset, f"seeds of {arm}") for dataset in SPEC["datasets"] for arm in SPEC["arms"]
    }
    for row in rows:
        assert row["pairs"] == 1
        assert row["distance"] < row["distance_of_unrelated_starts"]
        assert row["loss_barrier"] >= 0


# --- again -----------------------------------------------------------------------------------------------------------


def test_a_finished_study_is_not_done_again(home, done):
    before = moments(done)
    (done / "summary.json").unlink()
    (done / "summary.parquet").unlink()
    study(home, done, speedup_metric="validation_loss_ema")
    assert moments(done) == before
    assert read_summary(done)["study"]["runs"] == {"finished": 8, "diverged": 0}
    assert (done / "summary.parquet").exists()


def test_a_changed_study_is_not_mixed_in(home, done, capsys):
    before = contents(done)
    study(home, done, **ONE, base={**BASE, "learning_rate": 2e-3})
    assert "8 results" in (told := capsys.readouterr().out)
    assert "are of other studies and are ignored" in told
    after = contents(done)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2 * 2
    summary = read_summary(done)
    assert {(row["dataset"], row["n"]) for row in summary["rows"]} == {("dino", 1)}
    assert summary["study"]["runs"]["finished"] == 2


def test_more_seeds_are_added_to_what_is_there(home, done, capsys):
    before = moments(done)
    study(home, done, seeds=3, datasets=["dino"])
    assert "4 of 6 runs are already finished" in capsys.readouterr().out
    after = moments(done)
    assert before.items() <= after.items()
    assert {row["n"] for row in read_summary(done)["rows"]} == {3}


@pytest.mark.parametrize("damage", ["half", "empty", "other", "list", "bytes"])
def test_a_damaged_result_is_done_again(home, done, damage, capsys):
    before = moments(done)
    victim = next(iter(sorted((done / "runs").glob("cosine--moons--1*"))))
    text = victim.read_text()
    record = json.loads(text)
    broken = {
        "half": text[: len(text) // 2].encode(),
        "empty": b"",
        "other": json.dumps({**record, "run": {**record["run"], "id": "another"}}).encode(),
        "list": b"[1]",
        "bytes": b"\xff\xfe\x00",
    }
    victim.write_bytes(broken[damage])
    capsys.readouterr()
    study(home, done, speedup_metric="validation_loss_ema")
    assert f"damaged and are computed again: {victim.stem}" in capsys.readouterr().out
    after = moments(done)
    changed = {name for name in after if before[name] != after[name]}
    assert changed == {f"runs/{victim.name}", f"weights/{victim.stem}.safetensors"}
    assert json.loads(victim.read_text())["train"]["results"] == pytest.approx(record["train"]["results"], rel=1e-3)


@pytest.mark.slow
def test_what_is_kept_beside_results_may_be_damaged(home, done, capsys):
    """The study itself, weights and begun stacks: told, and made again."""
    (spec, weights) = done / "spec.yaml", next(iter(sorted((done / "weights").glob("cosine--moons--1*"))))
    spec.write_bytes(spec.read_bytes()[: spec.stat().st_size // 2])
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (done / "stacks" / "begun-10").mkdir(parents=True)
    (done / "stacks" / "begun-10" / "state.pt").write_text("without a manifest")
    before = moments(done)
    capsys.readouterr()
    assert main(["study", "report", str(done)]) == 2
    assert f"{str(spec)!r} is damaged. Give the command" in capsys.readouterr().err
    study(home, done, speedup_metric="validation_loss_ema")
    shown = capsys.readouterr()
    assert shown.err.count(f"warning: {str(spec)!r} is damaged; it is written again.") == 1
    assert f"The weights of 1 run are damaged. This run is computed again: {weights.stem}." in shown.out
    assert shown.out.count("its runs start again") == 1
    assert not list((done / "stacks").glob("*"))
    after = moments(done)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {f"runs/{weights.stem}.json", f"weights/{weights.name}"}
    assert weights.read_bytes() == content
    assert main(["study", "report", str(done)]) == 0


def test_a_study_whose_file_is_gone_goes_on(home, done, capsys):
    (done / "spec.yaml").unlink()
    before = moments(done)
    study(home, done, speedup_metric="validation_loss_ema")
    assert f"{str(done / 'spec.yaml')!r} is missing; it is written again" in capsys.readouterr().err
    assert moments(done) == before


def test_another_study_is_not_replaced_by_way_of_a_damaged_file(home, done, capsys):
    (done / "spec.yaml").write_text("command: lrlab")
    study(home, done, status=2, base={**BASE, "learning_rate": 0.5})
    assert "spec.yaml' is damaged, and no result next to it belongs to this study" in capsys.readouterr().err


def test_a_report_believes_nothing_that_is_damaged(home, stacked, capsys):
    """A digit of a figure, and a bit of weights: refused with the names of the files."""
    done = shutil.copytree(stacked, home / "damaged")
    result = next(iter(sorted((done / "runs").glob("cosine--moons--1*"))))
    record = json.loads(result.read_text())
    record["train"]["results"]["energy_distance"] *= 1.5
    result.write_text(json.dumps(record))
    weights = next(iter(sorted((done / "weights").glob("constant--moons--1*"))))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["study", "report", str(done)]) == 2
    error = capsys.readouterr().err
    assert f"{str(result)!r} has" in error
    assert f"{str(weights)!r} is damaged" in error
    assert "give the command of the study again" in error


def test_a_study_that_was_downloaded_has_no_weights(home, done):
    shutil.rmtree(done / "weights")
    folder = StudyFolder(done)
    assert all(folder.find_damaged_weights(RunResult(record)) is None for record in records(done).values())


@pytest.fixture(scope="module")
def reported(stacked, bare, home):
    """A finished study with pictures."""
    out = shutil.copytree(stacked, home / "reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", write_report)
        assert main(["study", "report", str(out)]) == 0
    return out


def test_a_card_is_what_others_are_to_see(reported, tmp_path, capsys):
    done, card = reported, tmp_path / "card"
    assert main(["study", "card", str(done), f"--out={card}"]) == 0
    assert f"Wrote {card / 'README.md'}." in capsys.readouterr().out
    names = {path.name for path in card.iterdir()}
    assert names >= {"README.md", "summary.json", "summary.parquet", "runs.parquet", "spec.yaml", "tables"}
    assert names - {path.name for path in (done / "report").iterdir()} == {
        "README.md",
        *names & {path.name for path in done.iterdir()},
    }
    _, front, text = (card / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "diffusers_lrlab"
    assert text.strip() == (done / "report/report.md").read_text().strip()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (card / picture).is_file(), picture
    assert str(done.parent) not in text + (card / "spec.yaml").read_text() + (card / "summary.json").read_text()
    (card / "loss.png").write_bytes(b"of an older study")
    assert main(["study", "card", str(done), f"--out={card}"]) == 0  # an older card is replaced
    assert (card / "loss.png").read_bytes() == (done / "report/loss.png").read_bytes()


def test_a_card_makes_its_own_tables(reported, tmp_path, capsys, monkeypatch):
    """Of the values of each seed: nothing else of the study is there, and the code is that of any report."""
    card = tmp_path / "card"
    assert main(["study", "card", str(reported), f"--out={card}"]) == 0
    before = {name: (card / name).read_bytes() for name in ("summary.json", "summary.parquet", "runs.parquet")}
    for name in ("summary.json", "summary.parquet"):
        (card / name).unlink()
    monkeypatch.setattr(report, "write_report", write_report)
    assert main(["study", "report", str(card)]) == 0
    assert {name: (card / name).read_bytes() for name in before} == before
    tables = {path.name: path.read_bytes() for path in (card / "tables").iterdir()}
    assert {path.name: path.read_bytes() for path in (card / "report" / "tables").iterdir()} == tables
    assert {"summary_energy_distance.tex", "speedups.tex", "cost.tex", "consistency.tex"} <= {*tables}
    made, there = ((path / "report" / "report.md").read_text() for path in (card, reported))
    assert made.split("## Before you rely on it")[0] == there.split("## Before you rely on it")[0]
    values = read_runs(card).results
    expected = records(reported)
    assert {run.id: run.results for run in values} == {name: run["train"]["results"] for name, run in expected.items()}


@pytest.mark.parametrize("name", ["beyond", "with_hot"])
def test_the_table_of_runs_has_those_that_tuned_and_diverged(request, name, tmp_path):
    out, card = request.getfixturevalue(name), tmp_path / "card"
    card.mkdir()
    for file in ("runs.parquet", "spec.yaml"):
        shutil.copyfile(out / file, card / file)
    assert main(["study", "report", str(card)]) == 0
    assert (card / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    rows = parquet.read_table(card / "runs.parquet").to_pylist()
    runs = {run["run"]["id"]: run for run in records(out).values()}
    assert {row["id"] for row in rows} == {*runs}
    for row in rows:
        run = runs[row["id"]]["run"]
        for key in ("arm", "dataset", "seed", "stage", "status", "error", "learning_rate"):
            assert row[key] == run[key]
        assert row["validation_loss_ema"] == runs[row["id"]]["train"]["results"].get("validation_loss_ema")
        assert row["training_seconds"] == runs[row["id"]]["train"]["training_seconds"]


@pytest.mark.parametrize("damage", ["cut", "text", "another table"])
def test_a_damaged_table_of_runs_is_said(stacked, tmp_path, capsys, damage):
    for file in ("runs.parquet", "spec.yaml"):
        shutil.copyfile(stacked / file, tmp_path / file)
    table = tmp_path / "runs.parquet"
    if damage == "another table":
        shutil.copyfile(stacked / "summary.parquet", table)
    else:
        table.write_bytes(b"text" if damage == "text" else table.read_bytes()[:500])
    assert main(["study", "report", str(tmp_path)]) == 2
    assert "runs.parquet' is damaged, or not the table of a study's runs" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def test_a_metric_may_have_the_name_of_a_column(stacked, tmp_path):
    results = read_runs(stacked).results
    for result in results:
        result.results["seed"] = 0.5
    write_runs(results, {"metrics": []}, tmp_path)
    again = read_runs(tmp_path)
    assert [(run.seed, run.results) for run in again.results] == [(run.seed, run.results) for run in results]
    assert again.notes == {"metrics": []}


def test_a_card_is_whole_after_a_report_of_it(reported, tmp_path, capsys):
    card = tmp_path / "card"
    assert main(["study", "card", str(reported), f"--out={card}"]) == 0
    assert main(["study", "report", str(card)]) == 0
    assert main(["check", str(card)]) == 0, capsys.readouterr()
    assert main(["study", "report", str(card)]) == 0


def test_a_text_that_a_metric_gives_is_in_the_table_of_runs(stacked, tmp_path):
    """As with the Fréchet distance, which names its features; a run that diverged has none."""
    results = read_runs(stacked).results
    results[0].results["frechet_features"] = "32 units"
    write_runs(results, {}, tmp_path)
    assert [run.results for run in read_runs(tmp_path).results] == [run.results for run in results]


@cases("options, expected", [
    ("report {done} --figures pfd", "--figures pfd: must be one of pdf, png, svg"),
    ("report {done} --dpi 300", "have no effect without --figures. Add --figures pdf, png or svg"),
    ("card {done} --out {done}-card --figures pdf", "--figures is of `lrlab study report DIR`"),
    ("run quick --out {done} --figure_width 3", "--figure_width is of `lrlab study report DIR`"),
])  # fmt: skip
def test_figures_are_of_the_report(done, capsys, options, expected):
    assert main(["study", *options.format(done=done).split()]) == 2
    assert expected in capsys.readouterr().err


def test_figures_are_asked_for_by_an_option(reported, tmp_path, monkeypatch):
    out = tmp_path / "card"
    assert main(["study", "card", str(reported), f"--out={out}"]) == 0
    monkeypatch.setattr(report, "write_report", write_report)
    assert main(["study", "report", str(out), "--figures=svg", "--figure_width=5.5"]) == 0
    names = {path.stem for path in (out / "report").glob("*.png")}
    assert {path.name for path in (out / "report" / "figures").iterdir()} == {f"{name}.svg" for name in names}


def columns_of_page():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "studies.md").read_text(encoding="utf-8")
    table = page.split("## The table of runs")[1].split("\n\n")[2]
    return [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_runs_are_read_as_a_table(reported, tmp_path):
    assert main(["study", "card", str(reported), f"--out={tmp_path / 'card'}"]) == 0
    frame = lab.read_study(reported)
    assert len(frame) == len(records(reported)) == 8
    for row in frame.to_dict("records"):
        record = records(reported)[row["id"]]
        assert {name: row[name] for name in ("arm", "dataset", "seed")} == {
            name: record["run"][name] for name in ("arm", "dataset", "seed")
        }
        assert row["energy_distance"] == record["train"]["results"]["energy_distance"]
    assert {*columns_of_page()} <= {*frame.columns}
    pandas.testing.assert_frame_equal(lab.read_study(str(tmp_path / "card")), frame)


@pytest.fixture
def beside(home, stacked):
    """A finished study of one's own, beside its model."""
    yield shutil.copytree(stacked, home / "beside")
    shutil.rmtree(home / "beside")


def test_a_study_without_a_report_is_read_from_its_results(beside):
    done = beside
    frame = lab.read_study(done)
    (done / "runs.parquet").unlink()
    pandas.testing.assert_frame_equal(lab.read_study(done), frame)
    gone, *left = sorted(done.glob("runs/*.json"))
    gone.unlink()
    assert sorted(lab.read_study(done).id) == [file.stem for file in left]
    for file in left:
        file.unlink()
    with pytest.raises(LabError, match="no result in .* yet. Resume the study with `lrlab study run`"):
        lab.read_study(done)


def test_results_since_the_report_are_read(beside):
    done = beside
    frame = lab.read_study(done)
    file = sorted(done.glob("runs/*.json"))[0]
    file.unlink()
    assert len(lab.read_study(done)) == len(frame)  # as it was reported
    others = sorted(done.glob("runs/*.json"))
    written = (done / "runs.parquet").stat().st_mtime_ns + 1
    os.utime(others[0], ns=(written, written))
    assert len(lab.read_study(done)) == len(others)


def test_a_study_that_tunes_is_read_while_it_does(home, beyond):
    folder = shutil.copytree(beyond, home / "tuning")
    (folder / "runs.parquet").unlink()
    every = lab.read_study(folder)
    assert {*every.stage} == {"compare", "tune"}
    for id in every.id[every.stage == "compare"]:
        (folder / "runs" / f"{id}.json").unlink()
    first = every.id[every.stage == "tune"].iloc[0]
    (folder / "runs" / f"{first}.json").unlink()
    left = lab.read_study(folder)
    assert {*left.stage} == {"tune"}
    assert first not in {*left.id}


def test_what_is_no_study_cannot_be_read(beside, tmp_path):
    done = beside
    with pytest.raises(LabError, match="There is no study in .*Make one by"):
        lab.read_study(tmp_path / "nothing")
    (done / "runs.parquet").write_bytes(b"text")
    with pytest.raises(LabError, match=r"runs.parquet' is damaged.* Restore it"):
        lab.read_study(done)
    (done / "runs.parquet").unlink()
    file = sorted(done.glob("runs/*.json"))[0]
    file.write_text(file.read_text()[:100])
    with pytest.raises(LabError, match=f"{file.name}' is damaged. Give the command of the study again"):
        lab.read_study(done)


def test_a_study_is_run_from_python(home, stacked, tmp_path, monkeypatch):
    """By a dict, as by the file that has it: numbers of numpy and tuples are taken."""
    monkeypatch.chdir(home)
    asked = {**SPEC, "speedup_metric": "validation_loss_ema", "seeds": np.int64(2), "datasets": ("dino", "moons")}
    page = lab.run_study(asked, str(tmp_path / "mine"), executor="stacked", quiet=True)
    assert page == tmp_path / "mine" / "report" / "index.html"
    of_file = lab.read_study(stacked)
    mine = lab.read_study(tmp_path / "mine")
    assert mine.id.tolist() == of_file.id.tolist()
    assert mine.energy_distance.tolist() == of_file.energy_distance.tolist()
    assert read_summary(tmp_path / "mine")["study"]["command"] == "lrlab study run spec.yaml --out mine --executor stacked"
    before = moments(tmp_path / "mine")
    lab.run_study(tmp_path / "mine" / "spec.yaml", tmp_path / "mine", executor="stacked", quiet=True)
    assert moments(tmp_path / "mine") == before


@cases("spec, options, expected", [
    ("quik", {}, "There is no study 'quik'. Did you mean 'quick'"),
    ({}, {}, "has no arms. Add them"),
    ({"arms": {"a": {"lr_scheduler": len}}, "datasets": ["dino"]}, {}, "The dict of a study may only hold text, numbers"),
    ({"arms": {"a": {}}, "dataset": ["dino"]}, {}, "'dataset'.*Did you mean 'datasets'"),
    ("quick", {"stack_size": 0}, "--stack_size 0: must be a whole number"),
    ("quick", {"executor": "stakced"}, "no executor 'stakced'"),
    ("quick", {"precision": "fp31"}, "fp31"),
    ("quick", {"workers": 2}, "workers"),
])  # fmt: skip
def test_a_study_that_cannot_be_run_from_python(tmp_path, spec, options, expected):
    with pytest.raises(LabError, match=f"(?s){expected}"):
        lab.run_study(spec, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_card_that_cannot_be_written(reported, done, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    assert main(["study", "card", str(reported), f"--out={mine}"]) == 2
    assert "holds something else than the card of a study" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]
    assert main(["study", "card", str(done), f"--out={tmp_path / 'card'}"]) == 2
    assert f"has no report yet. Make one by `lrlab study report {done}`" in capsys.readouterr().err
    shutil.copytree(reported / "report", done / "report")
    (done / "runs.parquet").unlink()
    assert main(["study", "card", str(done), f"--out={tmp_path / 'card'}"]) == 2
    assert f"has no report yet. Make one by `lrlab study report {done}`" in capsys.readouterr().err
    assert main(["study", "card", str(tmp_path), f"--out={tmp_path / 'card'}"]) == 2
    assert "There is no study in" in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_the_list_of_presets(capsys):
    assert main(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    for line in lines:
        assert line.endswith(load_spec(line.split()[0]).title)


# --- stopped ---------------------------------------------------------------------------------------------------------

LONG = {"base": {**BASE, "max_train_steps": 60}, "datasets": ["dino"], "seeds": 2}


@pytest.fixture(scope="module")
def undisturbed(home):
    """The longer study, not stopped, by each executor."""
    return {
        executor: study(home, home / f"undisturbed-{executor}", f"--executor={executor}", **LONG)
        for executor in ("stacked", "local")
    }


@contextlib.contextmanager
def started(home, out, *options, **changes):
    """A study in a process of its own."""
    process = Started(DRIVER, "study", "run", write_spec(home, **changes), f"--out={out}", *options, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process, folder, pattern):
    """Until there is such a file."""
    deadline = time.monotonic() + 240
    while not any(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def counted_updates():
    """Yields a list that grows by one with every update that is computed, of a stack or of a run by itself."""
    updates = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Stack, Trainer):

            def do_update(self, *inputs, original=kind.do_update):
                updates.append(1)
                return original(self, *inputs)

            patch.setattr(kind, "do_update", do_update)
        yield updates


# executor, what to wait for: in the middle of training, and in the middle of measuring.
MOMENTS = [
    ("stacked", "stacks/[!.]*"),
    ("stacked", "runs/[!.]*.json"),
    ("local", "local/*/checkpoint-*"),
    ("local", "runs/[!.]*.json"),
]


@pytest.mark.slow
@cases(("executor", "pattern"), MOMENTS)
def test_killed_and_started_again(home, undisturbed, tmp_path, executor, pattern):
    out = tmp_path / "out"
    with started(home, out, f"--executor={executor}", **LONG) as process:
        wait_for(process, out, pattern)
        process.kill()
        process.wait()
    assert len(records(out)) < 4
    assert not (out / "summary.json").exists()
    before = {name: moment for name, moment in moments(out).items() if name.startswith("runs/")}
    (out / "runs").mkdir(exist_ok=True)
    (out / "runs" / ".tmp-lrlab-1-constant.json").write_text("{")  # as of a process that was killed while it wrote
    with counted_updates() as updates:
        study(home, out, f"--executor={executor}", **LONG)
    assert_same_but_for_times(undisturbed[executor], out)
    assert before.items() <= moments(out).items()
    if (executor, pattern) == ("stacked", "runs/[!.]*.json"):
        assert not updates
    else:
        in_full = 60 * (min(4, torch.get_num_threads()) if executor == "stacked" else 4)
        assert 0 < len(updates) < in_full
    assert not list(out.rglob(".tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "pattern", "number", "status"),
    [
        ("stacked", "stacks/[!.]*", signal.SIGINT, 130),
        ("local", "local/*/checkpoint-*", signal.SIGTERM, 143),
    ],
)
def test_stopped_by_a_signal_while_another_waits(home, undisturbed, tmp_path, capsys, executor, pattern, number, status):
    out = tmp_path / "out"
    with started(home, out, f"--executor={executor}", **LONG) as process:
        wait_for(process, out, pattern)
        # Meanwhile somebody else wants to write there.
        os.kill(process.pid, signal.SIGSTOP)
        before = contents(out)
        study(home, out, status=2, **LONG)
        assert f"is being written by process {process.pid} on " in capsys.readouterr().err
        assert main(["study", "report", str(out)]) == 2
        capsys.readouterr()
        assert contents(out) == before
        os.kill(process.pid, signal.SIGCONT)
        process.send_signal(number)
        _, error = process.communicate(timeout=240)
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert "Give the same command again to go on" in error
    assert str(out) in error
    assert not (out / ".lock-holder").exists()
    study(home, out, f"--executor={executor}", **LONG)
    assert_same_but_for_times(undisturbed[executor], out)


@contextlib.contextmanager
def full_disk(num_bytes):
    """Files longer than this cannot be written, which to the writer is like a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


# Neither the state of a stack fits, nor the checkpoint of a run by itself.
@pytest.mark.parametrize(
    ("executor", "num_bytes", "what"),
    [
        ("stacked", 8_000, "stacks"),
        ("local", 1_500, "checkpoint-10"),
    ],
)
def test_a_full_disk(home, tmp_path, capsys, executor, num_bytes, what):
    out = tmp_path / "out"
    with full_disk(num_bytes):
        study(home, out, f"--executor={executor}", status=2, **ONE)
    error = capsys.readouterr().err
    assert "error: No room to write" in error
    assert what in error
    assert "Free some space; then give the same command again" in error
    assert "--overwrite_output_dir" not in error
    assert "Traceback" not in error
    assert not records(out)
    assert not list(out.rglob(".tmp*"))
    study(home, out, f"--executor={executor}", **ONE)
    assert len(records(out)) == 2


def test_a_disk_that_is_full_when_a_result_is_written(home, tmp_path, capsys, monkeypatch):
    """The weights fit, the result does not; what was trained is not lost."""
    out = tmp_path / "out"
    write = StudyFolder.write

    def full_write(folder, record):
        with full_disk(1000):
            write(folder, record)

    monkeypatch.setattr(StudyFolder, "write", full_write)
    study(home, out, "--executor=stacked", status=2, **ONE)
    assert "No room to write" in capsys.readouterr().err
    assert list(out.glob("stacks/*/state.pt"))
    monkeypatch.undo()
    with counted_updates() as updates:
        study(home, out, "--executor=stacked", **ONE)
    assert not updates
    assert len(records(out)) == 2


# --- learning rates --------------------------------------------------------------------------------------------------


def test_tuning_takes_the_best_rate_that_does_not_diverge(home, tmp_path):
    tune = {"learning_rates": ["1e-4", 1e-2, 1e30], "seeds": [10, 11], "metric": "validation_loss_ema"}
    out = study(home, tmp_path / "out", **ONE, tune=tune)
    scores, chosen = {}, {}
    for record in records(out).values():
        run = record["run"]
        if run["stage"] == "compare":
            chosen[run["arm"]] = run["learning_rate"]
            assert record["config"]["learning_rate"] == run["learning_rate"]
            assert run["seed"] == 0
        else:
            assert run["seed"] in (10, 11)
            score = record["train"]["results"].get("validation_loss_ema", math.inf)
            scores.setdefault(run["arm"], {}).setdefault(run["learning_rate"], []).append(score)
    assert {rate: len(values) for rate, values in scores["cosine"].items()} == {1e-4: 2, 1e-2: 2, 1e30: 2}
    for arm, of_arm in scores.items():
        means = {rate: np.mean(values) for rate, values in of_arm.items()}
        assert math.isinf(means[1e30])
        assert chosen[arm] == min(means, key=means.get) == 1e-2
    rows = read_summary(out)["tuning"]
    assert {(row["arm"], row["learning_rate"]) for row in rows if row["chosen"]} == set(chosen.items())
    assert {row["score"] for row in rows if row["learning_rate"] == 1e30} == {None}
    assert read_summary(out)["study"]["runs"] == {"finished": 2 + 8, "diverged": 4}
    before = moments(out)
    study(home, out, **ONE, tune=tune)
    assert moments(out) == before


def test_a_chosen_rate_at_the_edge_is_said(home, tmp_path):
    """Here of the rates that were tried: the best may lie beyond."""
    tune = {"factors": [0.1, 1, 10], "seeds": [10], "metric": "validation_loss_ema", "extensions": 0}
    out = study(home, tmp_path / "out", **ONE, tune=tune, arms={"cosine": SPEC["arms"]["cosine"]})
    rows = read_summary(out)["tuning"]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert [row["at_edge"] for row in rows] == [False, False, True]


def test_an_arm_that_diverges_at_every_rate_takes_part_with_the_lowest(home, tmp_path):
    """The others are compared as ever."""
    tune = {"factors": [1, 10], "seeds": [10], "metric": "validation_loss_ema"}
    out = study(home, tmp_path / "out", **ONE, tune=tune, arms={**SPEC["arms"], "hot": HOT})
    rows = [row for row in read_summary(out)["rows"] if row["metric"] == "validation_loss_ema"]
    assert {row["arm"]: row["n"] for row in rows} == {"constant": 1, "cosine": 1, "hot": 0}
    assert {row["arm"]: row["diverged"] for row in rows} == {"constant": 0, "cosine": 0, "hot": 1}
    rates = {row["learning_rate"]: row["chosen"] for row in read_summary(out)["tuning"] if row["arm"] == "hot"}
    assert [*rates] == pytest.approx([1e27, 1e28, 1e29, 1e30, 1e31])
    assert [*rates.values()] == [True, False, False, False, False]
    assert main(["study", "report", str(out)]) == 0


# The best rate of these is far above the grid.
BEYOND = {**ONE, "tune": {"factors": [0.1, 0.3], "seeds": [10], "metric": "validation_loss_ema", "extensions": 5}}
BEYOND |= {"metrics": ["validation_loss_ema"]}


def tuning_of(out):
    return {record["run"]["id"]: record["run"] for record in records(out).values() if record["run"]["stage"] == "tune"}


@pytest.fixture(scope="module")
def beyond(home):
    return study(home, home / "beyond", "--executor=stacked", **BEYOND)


def test_rates_beyond_the_edge_are_tried(beyond, capsys):
    rows = read_summary(beyond)["tuning"]
    for arm in SPEC["arms"]:
        rates = {row["learning_rate"]: row["score"] for row in rows if row["arm"] == arm}
        assert len(rates) > 3
        assert [*rates] == pytest.approx([1e-3 * 10 ** (number / 2 - 1) for number in range(len(rates))], rel=0.06)
        best = min(rates, key=rates.get)
        assert min(rates) < best < max(rates)
        assert [(row["learning_rate"], row["at_edge"]) for row in rows if row["arm"] == arm and row["chosen"]] == [
            (best, False)
        ]
        compared = [record["run"] for record in records(beyond).values() if record["run"]["stage"] == "compare"]
        assert {run["learning_rate"] for run in compared if run["arm"] == arm} == {best}
    before = (beyond / "summary.json").read_text()
    assert main(["study", "report", str(beyond)]) == 0
    assert (beyond / "summary.json").read_text() == before
    capsys.readouterr()
    main(["study", "run", str(beyond / "spec.yaml"), f"--out={beyond}", "--dry_run"])
    text = capsys.readouterr().out
    assert f"before, {len(rows)} runs to choose learning rates\n" in text
    assert f"{len(records(beyond))} of them are already finished" in text


def test_the_forecast_says_that_tuning_may_add_runs(home, capsys):
    assert main(["study", "run", str(write_spec(home, **BEYOND)), "--dry_run"]) == 0
    assert "before, 4 runs to choose learning rates, and up to 10 more" in capsys.readouterr().out


def test_tuning_goes_on_in_the_middle_of_a_round(home, beyond):
    """As after a kill: of the third round, one run of two has its result, and nothing after that is there."""
    out = shutil.copytree(beyond, home / "middle-of-a-round")
    rates = {run["id"]: run["learning_rate"] for run in tuning_of(out).values()}
    third = sorted(name for name, rate in rates.items() if rate == pytest.approx(3e-3))
    assert len(third) == 2
    gone = {third[0], *(name for name, rate in rates.items() if rate > 5e-3)} | {*records(out)} - {*rates}
    for name in gone:
        (out / "runs" / f"{name}.json").unlink()
    assert main(["study", "report", str(out)]) == 2  # the rates are not chosen yet
    study(home, out, "--executor=stacked", **BEYOND)
    assert_same_but_for_times(beyond, out)


def test_a_study_without_extensions_goes_on_with_them(home, beyond, tmp_path):
    """Its results stay."""
    out = study(home, tmp_path / "out", **{**BEYOND, "tune": {**BEYOND["tune"], "extensions": 0}})
    assert {row["at_edge"] for row in read_summary(out)["tuning"] if row["chosen"]} == {True}
    before = moments(out)
    study(home, out, "--executor=stacked", **BEYOND)
    assert before.items() <= moments(out).items()
    assert {*tuning_of(out)} == {*tuning_of(beyond)}
    assert read_summary(out)["tuning"] == read_summary(beyond)["tuning"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "pool"])
def test_executors_agree_on_the_rates_that_are_tried(home, beyond, tmp_path, executor):
    out = study(home, tmp_path / "out", f"--executor={executor}", **BEYOND)
    assert {*tuning_of(out)} == {*tuning_of(beyond)}


@pytest.mark.slow
def test_killed_while_it_tunes_beyond_the_edge(home, beyond, tmp_path):
    (name,) = [
        run["id"] for run in tuning_of(beyond).values() if run["arm"] == "cosine" and 2e-3 < run["learning_rate"] < 5e-3
    ]
    out = tmp_path / "out"
    with started(home, out, "--executor=stacked", **BEYOND) as process:
        wait_for(process, out, f"runs/{name}.json")
        process.kill()
        process.wait()
    assert len(tuning_of(out)) < len(tuning_of(beyond))
    study(home, out, "--executor=stacked", **BEYOND)
    assert_same_but_for_times(beyond, out)


# --- divergence, little to compare -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_hot(home):
    """One seed; one of three arms diverges."""
    return study(home, home / "hot", **ONE, arms={**SPEC["arms"], "hot": HOT})


@pytest.mark.parametrize("executor", ["stacked", "local"])
def test_an_arm_that_diverges(home, with_hot, tmp_path, executor):
    out = with_hot
    if executor == "local":
        out = study(home, tmp_path / "out", "--executor=local", **ONE, arms={**SPEC["arms"], "hot": HOT})
    hot = next(record for record in records(out).values() if record["run"]["arm"] == "hot")
    assert hot["run"]["status"] == "diverged"
    assert hot["run"]["error"].startswith("The loss ")
    assert "not finite" in hot["run"]["error"]
    assert "1e+30" in hot["run"]["error"]
    assert hot["train"]["results"] == {}
    assert hot["train"]["updates_done"] <= 10
    assert "samples" not in hot
    summary = read_summary(out)
    assert summary["study"]["runs"] == {"finished": 2, "diverged": 1}
    rows = {(row["arm"], row["metric"]): row for row in summary["rows"]}
    for metric in SPEC["metrics"]:
        assert (rows["hot", metric]["n"], rows["hot", metric]["diverged"], rows["hot", metric]["mean"]) == (0, 1, None)
        assert (rows["cosine", metric]["n"], rows["cosine", metric]["diverged"]) == (1, 0)


def test_a_neighbour_that_diverges_changes_nothing(with_hot, stacked):
    ours, others = records(with_hot), records(stacked)
    for name in set(ours) & set(others):
        assert ours[name]["train"]["results"] == pytest.approx(others[name]["train"]["results"], rel=1e-4)
    assert len(set(ours) & set(others)) == 2


def test_one_seed_gives_means_and_no_more(with_hot):
    for row in read_summary(with_hot)["rows"]:
        assert row["n"] in (0, 1)
        assert {row[key] for key in ("std", "ci_low", "ci_high", "p", "p_adjusted", "effect_size")} == {None}
        if row["arm"] == "cosine":
            assert row["mean"] is not None
    assert "consistency" not in read_summary(with_hot)


def test_reports_of_studies_with_little_in_them(home, with_hot, tmp_path, bare, capsys):
    """A diverged arm, a single arm, nothing but divergence; and `report` writes the same summary again."""
    out = shutil.copytree(with_hot, tmp_path / "out")
    for arms, diverged in (({**SPEC["arms"], "hot": HOT}, 1), ({"cosine": SPEC["arms"]["cosine"]}, 0), ({"hot": HOT}, 1)):
        before = moments(out)
        study(home, out, **ONE, arms=arms, baseline=next(iter(arms)))
        assert moments(out) == before
        summary = read_summary(out)
        assert summary["study"]["runs"]["diverged"] == diverged
        (out / "summary.json").unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "write_report", write_report)
            assert main(["study", "report", str(out)]) == 0
        assert f"Wrote {out / 'report' / 'index.html'}" in capsys.readouterr().out
        assert read_summary(out) == summary
        text = (out / "report" / "report.md").read_text()
        assert ("diverged" in text) >= bool(diverged)
        assert "nan" not in text.lower().replace("finance", "").split()


def test_nothing_but_divergence_and_no_metric_named(home, tmp_path):
    out = study(home, tmp_path / "out", **ONE, arms={"hot": HOT}, metrics=None)
    assert read_summary(out)["rows"] == []
    assert parquet.read_table(out / "summary.parquet").num_rows == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", write_report)
        assert main(["study", "report", str(out)]) == 0


# --- who does what ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_stacked_is_done_by_itself(home, tmp_path, capsys):
    (home / "unet.json").write_text(json.dumps(TINY_UNET))
    mixed = {
        "base": {"max_train_steps": 4, "train_batch_size": 4, "num_validation_images": 16, "lr_warmup_steps": 0},
        "datasets": {
            "dino": {"dataset_name": "dino", "model_config_name_or_path": "tiny"},
            "digits": {
                "dataset_name": "digits",
                "model_config_name_or_path": "unet.json",
                "frechet_samples": 0,
                "num_inference_steps": 2,
            },
        },
        "arms": {"constant": {"lr_scheduler": "constant"}},
        "seeds": 1,
        "metrics": ["validation_loss"],
    }
    out = study(home, tmp_path / "out", **mixed)
    told = capsys.readouterr().out
    assert "Not stacked (stacks are of MLPDenoisers on points" in told
    assert "): constant on digits." in told
    executors = {record["run"]["dataset"]: record["run"]["executor"]["name"] for record in records(out).values()}
    assert executors == {"dino": "stacked", "digits": "local"}
    (pictures,) = (record["samples"] for record in records(out).values() if record["run"]["dataset"] == "digits")
    assert Image.open(io.BytesIO(base64.b64decode(pictures["png"]))).size == (4 * 8, 4 * 8)
    assert {row["dataset"]: row["n"] for row in read_summary(out)["rows"]} == {"dino": 1, "digits": 1}


def test_stacks_of_another_size_give_the_same(home, stacked, tmp_path):
    out = study(home, tmp_path / "out", "--stack_size=3", datasets=["dino"])
    ours, others = records(out), records(stacked)
    assert set(ours) < set(others)
    for name, record in ours.items():
        assert record["train"]["results"] == pytest.approx(others[name]["train"]["results"], rel=1e-4)
        assert record["run"]["executor"]["members"] <= 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stacks_have_as_many_members_as_was_asked_for_at_most(home, tmp_path, size):
    runs = expand(load_spec(str(write_spec(home))))
    stacks_of = list(split_into_stacks(runs, StudyContext(StudyFolder(tmp_path), size)))
    assert max(map(len, stacks_of)) <= size
    assert sorted(run.id for some in stacks_of for run in some) == sorted(run.id for run in runs)


def test_runs_of_data_that_have_changed_are_done_again(home, tmp_path, capsys):
    own = tmp_path / "own"
    rng = np.random.default_rng(0)
    prints = []
    for shift in (0.0, 3.0):
        points = rng.normal(shift, 1, size=(600, 2)).astype(np.float32).tolist()
        shutil.rmtree(own, ignore_errors=True)
        datasets.Dataset.from_dict({"x": points}).save_to_disk(own)
        study(home, tmp_path / "out", datasets={"mine": {"dataset_name": str(own)}}, seeds=1, arms={"constant": {}})
        (record,) = records(tmp_path / "out").values()
        prints.append(record["train"]["data_fingerprint"])
    assert "The data of 1 run have changed. This run is computed again" in capsys.readouterr().out
    assert prints[0] != prints[1]


@pytest.mark.parametrize("executor", ["stacked", "local"])
def test_what_was_begun_with_other_data_is_begun_again(home, tmp_path, monkeypatch, executor):
    """Trained, and not yet measured, when the points change."""
    own, out = tmp_path / "own", tmp_path / "out"

    def run(shift, status):
        points = np.random.default_rng(0).normal(shift, 1, size=(600, 2)).astype(np.float32).tolist()
        shutil.rmtree(own, ignore_errors=True)
        datasets.Dataset.from_dict({"x": points}).save_to_disk(own)
        changes = {"datasets": {"mine": {"dataset_name": str(own)}}, "seeds": 1, "arms": {"constant": {}}}
        with counted_updates() as updates:
            study(home, out, f"--executor={executor}", status=status, **changes)
        return len(updates)

    def fail(*_):
        raise LabError("Something came between.")

    with monkeypatch.context() as patch:
        patch.setattr(measure, "finish", fail)
        assert run(0.0, status=2) == 30
        assert run(0.0, status=2) == 0
    assert run(3.0, status=0) == 30
    assert len(records(out)) == 1


def test_a_run_that_breaks_at_its_very_end_diverged(home, tmp_path):
    """After the last validation: with one update, and nothing held out."""
    base = {**BASE, "max_train_steps": 1, "num_validation_images": 0}
    for metric in ("energy_distance", "training_set_loss"):
        out = study(home, tmp_path / metric, base=base, arms={"hot": HOT}, metrics=[metric], datasets=["dino"])
        for record in records(out).values():
            assert record["run"]["status"] == "diverged"
            assert record["run"]["error"] == "The samples at the end are not finite."
            assert record["train"]["results"] == {}
        assert read_summary(out)["study"]["runs"] == {"finished": 0, "diverged": 2}


def test_a_dry_run_knows_the_rates_that_were_chosen(home, tmp_path, capsys):
    tune = {"factors": [0.3, 3], "seeds": [10], "metric": "validation_loss_ema", "extensions": 0}
    out = study(home, tmp_path / "out", **ONE, tune=tune)
    capsys.readouterr()
    assert main(["study", "run", str(home / "study.yaml"), f"--out={out}", "--dry_run"]) == 0
    assert f"6 of them are already finished in {out}\n  total: about 0 s" in capsys.readouterr().out


def test_what_a_study_keeps_of_itself_can_be_run(home, tmp_path):
    out = study(home, tmp_path / "out", **ONE)
    before = moments(out)
    assert main(["study", "run", str(out / "spec.yaml"), f"--out={out}"]) == 0
    assert moments(out) == before


def test_a_folder_is_of_one_study(home, done, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text((home / "study.yaml").read_text())
    before = contents(done)
    assert main(["study", "run", str(other), f"--out={done}"]) == 2
    assert "holds the study 'study', and this is 'other'" in capsys.readouterr().err
    assert contents(done) == before


@pytest.mark.slow
def test_two_precisions_one_after_the_other(home, tmp_path):
    arms = {"fp32": {}, "bf16": {"mixed_precision": "bf16"}}
    out = study(home, tmp_path / "out", "--executor=local", arms=arms, baseline=None, **ONE)
    first, second = (record["curves"]["loss"]["loss"] for record in records(out).values())
    assert first != second
    assert first == pytest.approx(second, rel=0.05)


def test_exact_kl_alone_is_measured(home, tmp_path):
    changes = {"metrics": ["exact_kl", "sharpness"], "datasets": ["eight_gaussians"], "seeds": 1}
    out = study(home, tmp_path / "out", **changes, arms={"constant": SPEC["arms"]["constant"]})
    (record,) = records(out).values()
    assert {"exact_kl", "sharpness"} <= set(record["train"]["results"])
    assert {row["metric"]: row["n"] for row in read_summary(out)["rows"]} == {"exact_kl": 1, "sharpness": 1}


def test_without_held_out_points(home, tmp_path):
    base = {**BASE, "num_validation_images": 0}
    out = study(home, tmp_path / "out", base=base, metrics=["energy_distance"], datasets=["dino"])
    for row in read_summary(out)["consistency"]:
        assert row["distance"] is not None
        assert row["loss_barrier"] is None


def test_dry_run(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tune = {"factors": [0.3, 1], "seeds": [10], "metric": "validation_loss_ema"}
    spec = write_spec(home, tune=tune)
    for executor in ("stacked", "local"):
        assert main(["study", "run", str(spec), "--dry_run", f"--executor={executor}"]) == 0
        shown = capsys.readouterr().out
        assert "Of a test" in shown
        assert "2 arms (constant, cosine; baseline constant) x 2 data sets (dino, moons) x 2 seeds = 8 runs" in shown
        assert "before, 8 runs to choose learning rates" in shown
        assert f"{executor}: 16 runs, 480 updates, about " in shown
        assert " s of training" in shown
        assert re.search(r"evaluation, \d+ MiB of memory", shown)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not list(tmp_path.iterdir())


def test_validations_of_every_member_are_forecast(home, monkeypatch):
    """A plateau that looks at every update costs more than its neighbour in the stack."""
    monkeypatch.setattr(forecast, "_validation_and_measurement_seconds", lambda *_: (1.0, 10.0))
    arms = {"constant": {"validation_steps": 15}, "plateau": {"lr_scheduler": "reduce_lr_on_plateau", "validation_steps": 1}}
    spec = load_spec(str(write_spec(home, arms=arms, seeds=1, datasets=["dino"])))
    shown = forecast.describe_study(spec, "stacked", None)
    seconds = (30 // 15 + 30 // 1 + 2 * 10) / min(2, torch.get_num_threads())
    assert f"of training and {seconds:.3g} s of evaluation" in shown


def test_the_memory_of_a_stack_has_its_optimizers_in_it(home, tmp_path):
    """Of every member, Adam keeps two numbers per weight, and SGD with momentum one."""
    context, memory = StudyContext(StudyFolder(tmp_path), quiet=True), []
    for optimizer in ("adamw", "sgd"):
        runs = expand(load_spec(str(write_spec(home, base={**BASE, "optimizer": optimizer}))))
        memory.append(forecast._probe_stack(runs, context).memory)
    plan, _ = context.plan(runs[0])
    assert memory[0] - memory[1] >= len(runs) * 4 * plan.num_parameters


@pytest.mark.skipif(torch.accelerator.is_available(), reason="bfloat16 products by name are for CPUs")
def test_another_precision_is_another_run(home, stacked, done, tmp_path):
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        out = study(home, tmp_path / "out", "--precision=bf16", **ONE)
        assert torch.backends.mkldnn.matmul.fp32_precision == before  # of what comes after it in this process
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert len(records(out)) == 2
    assert not set(records(out)) & set(records(stacked))
    assert "--precision bf16" in read_summary(out)["study"]["command"]
    kept = spec_from_dict(StudyFolder(out).read_spec()[0], out)
    assert {run.id for run in expand(kept)} == set(records(out))
    assert load_spec(str(out / "spec.yaml")).precision == "bf16"
    assert main(["study", "report", str(out)]) == 0
    assert read_summary(out)["study"]["runs"]["finished"] == 2


@pytest.mark.slow
def test_from_python_and_by_the_script(home, done, capsys):
    """`run_study` and `training_scripts/run_study.py` do what the command does."""
    import importlib.util

    path = Path(__file__).parents[2] / "training_scripts" / "run_study.py"
    loaded = importlib.util.spec_from_file_location("run_study_script", path)
    script = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(script)
    spec = write_spec(home, speedup_metric="validation_loss_ema")
    before = moments(done)
    with pytest.MonkeyPatch.context() as patch:
        (home / "mine.py").write_text("")
        patch.setattr(plugins, "_loaded", {})
        patch.setattr(sys, "argv", ["run_study.py", str(spec), f"--out={done}", f"--import={home / 'mine.py'}"])
        assert script.main() == 0
        assert "python training_scripts/run_study.py" in read_summary(done)["study"]["command"]
        assert "--import mine.py" in read_summary(done)["study"]["command"]
        patch.setattr(sys, "argv", ["run_study.py", str(spec)])
        assert script.main() == 2
        assert "error: Where to?" in capsys.readouterr().err
        patch.setenv("WORLD_SIZE", "2")
        patch.setattr(sys, "argv", ["run_study.py", str(spec), f"--out={done}"])
        assert script.main() == 2
        assert "in one process" in capsys.readouterr().err
    assert run_study(load_spec(str(spec)), done, quiet=True) == done / "report" / "index.html"
    with pytest.raises(LabError, match="no executor 'x'"):
        run_study(load_spec(str(spec)), done, "x")
    assert moments(done) == before


# --- consistency and the loss between runs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_seeds(home, stacked):
    """Runs of one arm on one data set with their results, and where they are."""
    context = StudyContext(StudyFolder(stacked), quiet=True)
    runs = [run for run in expand(load_spec(str(write_spec(home)))) if (run.arm, run.dataset) == ("constant", "dino")]
    return runs, context.folder.results(runs), context


def test_a_run_and_itself_are_no_distance_apart(two_seeds):
    runs, (result, _), context = two_seeds
    twin = copy.deepcopy(result)
    twin.seed = 1
    (row,) = consistency(runs, [result, twin], context)
    assert row["distance"] == 0 == row["ratio"]
    assert row["distance_of_unrelated_starts"] > 0.5
    assert row["loss_barrier"] == pytest.approx(0, abs=1e-6)
    assert row["curvature_of_the_loss"] == pytest.approx(0, abs=1e-4)


def test_networks_of_another_size_are_compared_by_seed(two_seeds):
    runs, results, context = two_seeds
    others = copy.deepcopy(results)
    for result in others:
        result.arm = "wide"
        result.record["train"]["num_parameters"] += 1
    rows = {
        row["between"]: row for row in consistency(runs, results, context) + consistency(runs, results + others[:1], context)
    }
    between = rows["constant and wide, by seed"]
    assert (between["pairs"], between["distance"]) == (1, 0)
    assert "loss_barrier" not in between
    assert "seeds of wide" not in rows


def test_runs_that_diverged_are_left_out(two_seeds):
    runs, results, context = two_seeds
    lost = copy.deepcopy(results[1])
    lost.status = "diverged"
    assert consistency(runs, [results[0], lost], context) == []


def test_losses_along_a_line():
    """Of one weight from -1 to 1: a parabola, two valleys with a hill of height 1 between them, and a slope."""
    model = torch.nn.Linear(1, 1, bias=False)
    first, second = ({"weight": torch.full((1, 1), end)} for end in (-1.0, 1.0))
    x = np.linspace(-1, 1, 11)
    bowl = losses_between(model, first, second, lambda model: model.weight.square().item())
    np.testing.assert_allclose(bowl, x**2, atol=1e-6)
    assert barrier(bowl) == 0
    assert curvature(bowl) == pytest.approx(8, rel=1e-5)  # of (2 s - 1)^2
    assert model.weight.item() == 1
    hill = losses_between(model, first, second, lambda model: (model.weight.item() ** 2 - 1) ** 2)
    assert barrier(hill) == pytest.approx(1)
    slope = losses_between(model, first, second, lambda model: 3 * model.weight.item(), num_points=5)
    assert slope == pytest.approx([-3, -1.5, 0, 1.5, 3])
    assert barrier(slope) == pytest.approx(0, abs=1e-12)
    assert curvature(slope) == pytest.approx(0, abs=1e-12)
    assert barrier(np.array([0.0, 4.0, 2.0])) == 3


def test_sharpness_is_the_largest_eigenvalue():
    torch.manual_seed(3)
    model = MLPDenoiser(dimension=2, hidden_size=4, embedding_size=4, num_layers=1).double()
    scheduler = DDPMScheduler(num_train_timesteps=10)
    points = torch.randn(50, 2, dtype=torch.float64)
    validation = ValidationLoss(Batch(points), DDPM(scheduler), 50, "cpu")
    validation.noise = validation.noise.double()
    found = sharpness(SimpleNamespace(bare_model=model, validation=validation))
    parameters = list(model.parameters())
    noisy = scheduler.add_noise(points, validation.noise, validation.timesteps)
    loss = (model(noisy, validation.timesteps)[0] - validation.noise).square().mean()
    gradients = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [
        torch.cat([part.flatten() for part in torch.autograd.grad(entry, parameters, retain_graph=True)])
        for entry in gradients
    ]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(rows)).numpy()
    largest = eigenvalues[np.argmax(np.abs(eigenvalues))]
    assert found == pytest.approx(largest, rel=0.02)
