"""Small studies from beginning to end: results, divergence, executors and forecasts."""

import base64
import io
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from pyarrow import parquet
from runs import TINY_UNET
from small_studies import (
    BASE,
    HOT,
    ONE,
    SPEC,
    TINY,
    counted_updates,
    moments,
    read_summary,
    records,
    study,
    write_spec,
)

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core import plugins
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.models.mlp_denoiser import MLPDenoiser
from diffusers_lrlab.study import forecast, measure
from diffusers_lrlab.study.context import StudyContext
from diffusers_lrlab.study.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.study.stacked.stacks import split_into_stacks
from diffusers_lrlab.training.config import TrainingConfig

pytestmark = pytest.mark.usefixtures("bare")


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
    first = {}  # arms of one seed start with the same weights, and see the same points
    for record in runs.values():
        place = record["run"]["dataset"], record["run"]["seed"]
        first.setdefault(place, []).append(record["curves"]["loss"]["loss"][0])
    assert all(one == pytest.approx(other, rel=0.01) for one, other in first.values())
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} <= {
        *("runs", "spec.yaml", "summary.json", "summary.parquet", "runs.parquet", "manifest.json"),
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
        assert one["config"] == other["config"]


def test_summary_and_parquet_agree(stacked):
    summary = read_summary(stacked)
    rows = parquet.read_table(stacked / "summary.parquet").to_pylist()
    assert len(rows) == len(summary["rows"]) == 2 * 2 * 2
    for row, other in zip(summary["rows"], rows, strict=True):
        assert {**row, "seeds_needed": json.dumps(row["seeds_needed"])} == other
        assert not any(isinstance(value, float) and math.isnan(value) for value in other.values())
        own = [run["train"]["results"] for run in records(stacked).values()
               if (run["run"]["arm"], run["run"]["dataset"]) == (row["arm"], row["dataset"])]  # fmt: skip
        assert row["mean"] == pytest.approx(np.mean([results[row["metric"]] for results in own]))
        assert row["floor"] == own[0].get(f"{row['metric']}_of_held_out_points")
    assert summary["study"]["runs"] == {"finished": 8, "diverged": 0}
    assert summary["study"]["arms"]["cosine"]["description"] == "half a cosine"
    assert summary["study"]["command"] == "lrlab study run study.yaml --out stacked --executor stacked"
    seconds = sum(
        record["train"][f"{part}_seconds"]
        for record in records(stacked).values()
        for part in ("training", "sampling", "evaluation")
    )
    assert summary["study"]["hours"] == pytest.approx(seconds / 3600)


# --- divergence, little to compare -----------------------------------------------------------------------------------


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


# --- who does what ---------------------------------------------------------------------------------------------------


def test_stacks_have_as_many_members_as_was_asked_for_at_most(home, tmp_path):
    runs = expand(load_spec(write_spec(home)))
    for size in (1, 3):
        stacks_of = [*split_into_stacks(runs, StudyContext(StudyFolder(tmp_path), size))]
        assert max(map(len, stacks_of)) <= size
        assert sorted(run.id for some in stacks_of for run in some) == sorted(run.id for run in runs)


@pytest.mark.slow
def test_what_cannot_be_stacked_is_done_by_itself(home, tmp_path, capsys):
    (home / "unet.json").write_text(json.dumps(TINY_UNET))
    mixed = {
        "base": {"max_train_steps": 4, "train_batch_size": 4, "num_validation_images": 16, "lr_warmup_steps": 0},
        "datasets": {
            "dino": {"dataset_name": "dino", "model_config_name_or_path": "tiny"},
            "digits": {
                "dataset_name": "digits",
                "model_config_name_or_path": "unet.json",
                "distance_samples": 0,
                "num_inference_steps": 2,
            },
        },
        "arms": {"constant": {"lr_scheduler": "constant"}},
        "seeds": 1,
        "metrics": ["validation_loss"],
    }
    out = study(home, tmp_path / "out", **mixed)
    told = capsys.readouterr().out
    assert "Not stacked (stacks need an MLPDenoiser on points" in told
    assert "): constant on digits." in told
    executors = {record["run"]["dataset"]: record["run"]["executor"]["name"] for record in records(out).values()}
    assert executors == {"dino": "stacked", "digits": "local"}
    (pictures,) = (record["samples"] for record in records(out).values() if record["run"]["dataset"] == "digits")
    assert Image.open(io.BytesIO(base64.b64decode(pictures["png"]))).size == (4 * 8, 4 * 8)
    assert {row["dataset"]: row["n"] for row in read_summary(out)["rows"]} == {"dino": 1, "digits": 1}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["stacked", "local"])
def test_what_was_begun_with_other_data_is_begun_again(home, tmp_path, monkeypatch, capsys, executor):
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
        patch.setattr(measure, "measure", fail)
        assert run(0.0, status=2) == 30
        assert run(0.0, status=2) == 0
    assert run(3.0, status=0) == 30
    capsys.readouterr()
    assert run(0.0, status=0) == 30  # finished ones, too
    assert "The data of 1 run have changed. This run is computed again" in capsys.readouterr().out
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


@pytest.mark.slow
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


def test_an_arm_that_starts_from_weights(tmp_path):
    """It is stacked, and known by the content of the files, not by their path."""
    sizes = {key: value for key, value in TINY.items() if key != "_class_name"}
    base = {key: value for key, value in BASE.items() if key != "model_config_name_or_path"}
    arms = {"whole": {"pretrained_model_name_or_path": "start"}}

    def of(**changes):
        (run,) = expand(load_spec(write_spec(tmp_path, **{**ONE, "base": base, "arms": arms, **changes})))
        return run.id

    torch.manual_seed(3)
    MLPDenoiser(**sizes).save_pretrained(tmp_path / "start")
    out = study(tmp_path, tmp_path / "out", **ONE, base=base, arms=arms)
    (record,) = records(out).values()
    assert record["run"]["executor"]["name"] == "stacked"
    assert len(record["train"]["started_from"]["sha256"]) == 64
    assert str(tmp_path) not in str(record["config"])
    assert record["run"]["id"] == (before := of()) == of()
    torch.manual_seed(4)
    MLPDenoiser(**sizes).save_pretrained(tmp_path / "start")
    assert (after := of()) != before
    file = tmp_path / "start" / "config.json"
    file.write_text(file.read_text().replace('"coordinate_scale": 25.0', '"coordinate_scale": 5.0'))
    assert of() != after
    with pytest.raises(LabError, match="In the arm 'wrong' on 'dino'.*without parameters"):
        of(arms={"wrong": {**arms["whole"], "denoiser": "mlp:num_layers=3"}})


def test_validations_of_every_member_are_forecast(home, monkeypatch):
    """A plateau that looks at every update costs more than its neighbour in the stack."""
    monkeypatch.setattr(forecast, "_evaluation_seconds", lambda *_: (1.0, 10.0))
    arms = {"constant": {"validation_steps": 15}, "plateau": {"lr_scheduler": "reduce_lr_on_plateau", "validation_steps": 1}}
    shown = forecast.describe_study(write_spec(home, arms=arms, **ONE), "stacked", None)
    seconds = (30 // 15 + 30 // 1 + 2 * 10) / min(2, torch.get_num_threads())
    assert f"of training and {seconds:.3g} s of evaluation" in shown
    assert "warning: One seed gives no intervals and no tests. To compare arms, give 5 seeds or more." in shown


@pytest.mark.slow
def test_the_script_does_what_the_command_does(home, done, capsys, monkeypatch):
    script = runpy.run_path(str(Path(__file__).parents[2] / "training_scripts" / "run_study.py"))
    spec, before = write_spec(home), moments(done)
    (home / "mine.py").write_text("")
    monkeypatch.setattr(plugins, "_loaded", {})

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["run_study.py", str(spec), *options])
        return script["main"]()

    assert call(f"--out={done}", f"--import={home / 'mine.py'}") == 0
    assert re.search("python training_scripts/run_study.py .*--import mine.py", read_summary(done)["study"]["command"])
    assert moments(done) == before
    assert call() == 2
    assert "error: --out DIR is missing" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call(f"--out={done}") == 2
    assert "in one process" in capsys.readouterr().err
