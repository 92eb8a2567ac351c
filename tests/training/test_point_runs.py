"""Training on points: the same code as on images, so what the registries hold works here too."""

import json
import math
import re

import helpers
import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import started
import torch
from datasets import Dataset, Features

from diffusers_lrlab import PointDDPMPipeline, TrainingConfig, load_toy_dataset
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.labels import Example
from diffusers_lrlab.evaluation.distances import knn_kl
from diffusers_lrlab.training.kinds import kind_of
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan
from diffusers_lrlab.training.resolve import resolve_config

SMALL = {"_class_name": "MLPDenoiser", "hidden_size": 16, "num_layers": 1, "embedding_size": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def make_trainer(folder, model, **options):
    small = {"dataset_name": "moons", "max_train_steps": 6, "train_batch_size": 32, "num_validation_images": 64}
    small["num_inference_steps"] = 3  # previews are not what is looked at
    return helpers.make_trainer(folder, {**small, "model_config_name_or_path": str(model), "logging_steps": 2, **options})


def test_the_loss_of_a_point_is_the_textbooks(tmp_path, model):
    """Mean squared error of the noise, over coordinates, at the timestep and noise of the run's own streams."""
    trainer = make_trainer(tmp_path, model)
    batch = trainer.run.data.in_memory[:32]
    points = batch.data
    timesteps, (noise,) = trainer.run.objective.draw(0), trainer.run.objective.noise(0, points)
    assert noise.shape == points.shape
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)[timesteps][:, None]
    predicted = trainer.run.model(alphas.sqrt() * points + (1 - alphas).sqrt() * noise, timesteps).sample
    expected = (predicted - noise).square().mean().item()
    trainer.do_update(batch)
    assert float(trainer.log.sums[0]) == pytest.approx(expected, rel=1e-5)


# --- whole runs ------------------------------------------------------------------------------------------------------


def arguments(base, output, model, *more):
    return [
        *("--dataset_name=circle", f"--model_config_name_or_path={model}", f"--output_dir={output}"),
        *("--max_train_steps=40", "--train_batch_size=64", "--num_validation_images=200", "--eval_batch_size=50"),
        *("--ddpm_num_steps=20", "--logging_steps=5", "--checkpointing_steps=20", "--checkpoints_total_limit=0", *more),
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):
    base = tmp_path_factory.mktemp("points")
    stderr = runs.run(*arguments(base, base / "run", model, "--timestep_grad_every=20"), pictures=True)
    return base / "run", stderr


@pytest.mark.slow
def test_the_folder_holds_what_a_reader_expects(finished):
    folder, _ = finished
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {"model_index.json", "pipeline.py", "README.md", "denoiser/config.json", "denoiser/diffusers_lrlab.py"}
    pictures = ("loss", "lr", "progress", "samples", "timesteps", "trajectory")
    expected |= {"lrlab/metrics.jsonl", "lrlab/run.json", "lrlab/timesteps.parquet"}
    assert expected | {f"lrlab/{name}.png" for name in pictures} <= files
    assert "grad_noise_scale" in pq.read_schema(folder / "lrlab/timesteps.parquet").names


@pytest.mark.slow
def test_the_results_are_those_of_the_pipeline(finished):
    folder, _ = finished
    record = runs.read_record(folder)
    results = record["train"]["results"]
    assert record["config"]["data_kind"] == "points"
    assert results["distance_samples"] == results["distance_held_out_points"] == 200
    real, held_out = load_toy_dataset("circle"), load_toy_dataset("circle", 200, split="test")
    points = [np.asarray(data.with_format("numpy")["x"][:]) for data in (real, held_out)]
    assert results["kl_of_held_out_points"] == pytest.approx(knn_kl(*points), abs=1e-9)
    assert results["kl"] > results["kl_of_held_out_points"] + 1  # a model of forty updates
    for name in ("exact_kl", "energy_distance", "coverage", "exact_kl_standard_error"):
        assert math.isfinite(results[name])
    assert "training_set_loss" not in results  # of long runs: five passes over all training points


@pytest.mark.slow
def test_a_quick_try_draws_and_measures_no_samples(tmp_path, model):
    runs.run(*arguments(tmp_path, tmp_path / "run", model, "--no_evaluation"))
    card, results = (tmp_path / "run/README.md").read_text(), runs.read_record(tmp_path / "run")["train"]["results"]
    assert "validation_loss" in results
    assert not {"kl", "exact_kl", "distance_samples"} & {*results}
    linked = re.findall(r"\]\((lrlab/[^)]+)\)", card)
    assert "lrlab/loss.png" in linked
    assert [name for name in linked if not (tmp_path / "run" / name).exists()] == []
    assert not (tmp_path / "run/lrlab/samples").exists()


def test_the_card_shows_figures_beside_their_floors_and_its_examples_run(finished, tmp_path):
    folder, _ = finished
    card, results = (folder / "README.md").read_text(), runs.read_record(folder)["train"]["results"]
    row = next(line for line in card.splitlines() if line.startswith("| KL(data ‖ samples) by 5th"))
    assert row.split("|")[2:4] == [f" {results['kl']:.4g} ", f" {results['kl_of_held_out_points']:.4g} "]
    for words in ("import diffusers_lrlab", "trust_remote_code=True", "trajectory.png", "40 of 64 points"):
        assert words in card
    assert "images" not in card.partition("## How it was made")[0]
    blocks = [block.partition("```")[0] for block in card.split("```python\n")[1:]]
    code = "\n".join(blocks).replace("10_000", "10").replace("num_inference_steps=20", "num_inference_steps=2")
    status, _, error = started.run("-c", code, env=runs.environment(), cwd=tmp_path)
    assert (status, len(blocks)) == (0, 2), error


def write_points(folder, columns, **features):
    folder.mkdir()
    Dataset.from_dict(columns, features=Features(features) if features else None).to_parquet(str(folder / "train.parquet"))
    return folder


@pytest.mark.slow
def test_a_folder_of_points_trains_by_its_name_alone(tmp_path):
    """Five dimensions, found by their type; the pictures show two of them."""
    points = np.random.default_rng(0).normal(size=(300, 5)).round(4)
    folder = write_points(tmp_path / "data", {"label": list(range(300)), "features": points.tolist()})
    stderr = runs.run(
        *(f"--dataset_name={folder}", f"--output_dir={tmp_path / 'run'}", "--max_train_steps=4", "--ddpm_num_steps=10"),
        *("--train_batch_size=16", f"--cache_dir={tmp_path / 'cache'}"),
    )
    assert "Traceback" not in stderr
    record = runs.read_record(tmp_path / "run")
    assert record["config"]["data_kind"] == "points"
    assert record["train"]["data_shape"] == "5 dimensions"
    assert record["train"]["results"]["distance_samples"] == 60  # a fifth is held out
    assert PointDDPMPipeline.from_pretrained(tmp_path / "run")(num_points=3).points.shape == (3, 5)


def test_a_stream_is_not_read_to_its_end(tmp_path, model):
    options, _ = streamed(tmp_path, 900)
    trainer = make_trainer(tmp_path / "run", model, **{**options, "num_validation_images": 0})
    assert trainer.run.data.num_images is None
    assert list(trainer.updates()) == list(range(1, 7))
    read = []
    trainer.run.data.train = (read.append(row) or row for row in iter(lambda: Example([0.5, 0.5], {}), None))
    assert trainer.run.data.all_in_memory(10).data.shape == (10, 2)
    assert len(read) == 10


def streamed(base, *sizes):
    """The options of a run on a stream of shards of points, and the folder of these."""
    folder = base / "data"
    folder.mkdir()
    for shard, size in enumerate(sizes):
        points = np.random.default_rng(shard).normal(size=(size, 2))
        Dataset.from_dict({"x": points.tolist()}).to_parquet(str(folder / f"train-{shard}.parquet"))
    options = {"dataset_name": str(folder), "data_kind": "points", "streaming": True, "num_validation_images": 20}
    return {**options, "cache_dir": str(base / "cache")}, folder


def test_a_stream_is_resumed_to_the_bit(tmp_path, model):
    options, _ = streamed(tmp_path, 30, 40, 50, 60)
    options |= {"stream_shuffle_buffer": 16, "dataloader_num_workers": 1}
    whole = make_trainer(tmp_path / "whole", model, **options)
    assert list(whole.updates()) == [1, 2, 3, 4, 5, 6]
    stopped = make_trainer(tmp_path / "run", model, **options)
    for update in stopped.updates():
        if update == 3:
            break
    checkpoint = stopped.save()
    assert json.loads((checkpoint / "trainer.json").read_text())["data"]["stream"] == {"order": 1, "shards": 4, "rows": 160}
    resumed = make_trainer(tmp_path / "run", model, **options | {"dataloader_num_workers": 0})
    resumed.resume(checkpoint)
    assert list(resumed.updates()) == [4, 5, 6]
    for expected, found in zip(whole.run.model.parameters(), resumed.run.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_stream_whose_shards_changed_is_not_resumed(tmp_path, model):
    """Their names were swapped: as many shards with as many rows, and other rows behind each number."""
    options, folder = streamed(tmp_path, 30, 30, 30, 30)
    checkpoint = make_trainer(tmp_path / "run", model, **options).save()
    make_trainer(tmp_path / "run", model, **options).resume(checkpoint)
    first, second = folder / "train-0.parquet", folder / "train-1.parquet"
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    changed = make_trainer(tmp_path / "run", model, **options)
    with pytest.raises(
        LabError, match=r"with other settings:\n  data: .*fingerprint[^\n]*\nResume with the settings and data of that run"
    ):
        changed.resume(checkpoint)
    for shard in range(4):
        (folder / f"train-{shard}.parquet").unlink()
    first.write_bytes(contents[0])
    with pytest.raises(LabError, match=r"with other settings:\n  data: .*'shards': 4, 'rows': 100.*'shards': 1"):
        make_trainer(tmp_path / "run", model, **options).resume(checkpoint)


def test_points_on_another_scale_than_the_noise_are_told(tmp_path):
    points = 1e3 * np.random.default_rng(0).normal(size=(400, 2))
    folder = write_points(tmp_path / "data", {"x": points.tolist()})
    config = resolve_config(TrainingConfig(dataset_name=str(folder), data_kind="points", cache_dir=str(tmp_path / "cache")))
    data = kind_of(config).load_data(config, 1)
    assert "Rescale the points" in describe_plan(make_plan(config, data, None))
