"""Before training: each check fires on what deserves it alone; what `lrlab plan` says that a run costs."""

import json

import datasets
import helpers
import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import Diverged
from diffusers_lrlab.finder.result import deciding
from diffusers_lrlab.preflight import forecast
from diffusers_lrlab.preflight.checks import CHECKS, run_checks
from diffusers_lrlab.training.resolve import resolve_config

UNET = {key: value for key, value in runs.TINY_UNET.items() if key != "_class_name"}


def make_trainer(tmp_path, **options):
    options = {"max_train_steps": 200, **options}
    config, model = resolve_config(TrainingConfig(output_dir="run", **options)), None
    if config.data_kind is None and config.given_model is None:
        channels = {"in_channels": config.image_channels, "out_channels": config.image_channels}
        num_labels = None if config.label_column is None else (config.num_classes or 10) + (config.label_dropout > 0)
        model = UNET | channels | {"sample_size": config.resolution, "num_class_embeds": num_labels}
    return helpers.make_trainer(tmp_path / "run", options, model)


def with_images(tmp_path, draw, count=40, size=(8, 8), mode="L"):
    """Options for a folder of images that `draw(number)` makes the pixels of."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(count):
        pixels = np.broadcast_to(draw(number), (size[1], size[0], *([3] if mode == "RGB" else [])))
        pixels = pixels.astype(np.uint16 if mode == "I;16" else np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    channels = 3 if mode == "RGB" else 1
    options = {"train_data_dir": str(folder), "resolution": 8, "image_channels": channels, "train_batch_size": 4}
    return options | {"cache_dir": str(tmp_path / "cache"), "num_validation_images": 4, "learning_rate": 1e-3}


def noise(number):
    return np.random.default_rng(number).integers(0, 256, (8, 8))


def stream_of(tmp_path, labels):
    """Options for a stream of points with these labels."""
    points = np.random.default_rng(0).normal(size=(len(labels), 2)).tolist()
    (tmp_path / "points").mkdir()
    kinds = {"x": datasets.List(datasets.Value("float64")), "label": datasets.ClassLabel(num_classes=5)}
    rows = datasets.Dataset.from_dict({"x": points, "label": labels}, features=datasets.Features(kinds))
    rows.to_parquet(tmp_path / "points" / "0.parquet", batch_size=50)
    return {"train_data_dir": str(tmp_path / "points"), "streaming": True, "num_validation_images": 20}


def images(draw, **how):
    return lambda path: with_images(path, draw, **how)


# name of a check -> (options of a run, or what makes them in a folder; what the message says)
DESERVED = {
    "value_range": [
        (images(lambda n: noise(n) * 64 + 63, mode="I;16"), "values from -0.998 to -0.5 with"),
        (images(lambda n: 128 + noise(n) // 2), "values from 0.00392 to 1"),
        (images(lambda n: 120 + noise(n) % 4), "with a standard deviation of 0.0"),
        (images(lambda n: np.stack([noise(n), noise(n + 99), 0 * noise(n)], -1), mode="RGB"), "Channel 2 of the images is"),
        (images(lambda n: 6 * n if n % 4 == 0 else noise(n)), "a single colour"),
    ],
    "image_sizes": [
        (lambda path: with_images(path, noise) | {"resolution": 16}, "smaller than --resolution 16 (down to 8)"),
        (images(lambda n: np.tile(noise(n), 3), size=(24, 8)), "more than twice as long as wide"),
    ],
    "sorted_stream": [
        (lambda path: stream_of(path, np.arange(200) // 40), "sorted by 'label', which changes 4 times in the first 200"),
    ],
    "empty_classes": [({"label_column": "label", "num_classes": 12}, "2 of 12 classes have no image: 10, 11.")],
    "terminal_snr": [
        ({"dataset_name": "moons", "ddpm_num_steps": 50}, "The last of 50 timesteps has a signal-to-noise ratio of 1.5"),
    ],
    "ema_memory": [
        ({"max_train_steps": 1000, "ema_power": 1e6, "ema_inv_gamma": 1e-3}, "memory is longer than the run. Use --ema"),
        ({"ema": "half_life:images=1e6,rampup=1e9"}, "of the first tenth of 200 updates"),
    ],
    "warmup_share": [({"lr_warmup_steps": 100, "label_column": "label"}, "Warm-up takes 100 of 200 updates")],
    "learning_rate": [
        ({"learning_rate": 0.5}, "0.5 is 500 times the usual one for adamw"),
        ({"optimizer": "sgd", "learning_rate": 1e-4}, "of the usual one for sgd"),
    ],
}
CASES = [(name, case) for name, rows in DESERVED.items() for case in rows]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value[1])
def test_a_check_fires(tmp_path, name, case):
    options, part = case
    trainer = make_trainer(tmp_path, **(options(tmp_path) if callable(options) else options))
    found = run_checks(trainer)
    assert part in found[name]
    assert found.keys() <= {name, "terminal_snr", "value_range"}


GOOD = {
    "digits by sgd": {"optimizer": "sgd"},
    "digits under a curriculum": {"timestep_sampler": "clts", "lr_scheduler": "mdlrc"},
    "labelled digits": {"label_column": "label", "label_dropout": 0.1},
    "dino": {"dataset_name": "dino", "max_train_steps": 10_000},
    "a minute's run": {"max_train_steps": 60},
    "the remedy for a long EMA": {"ema": "power_function", "max_train_steps": 20},
    "half-lives": {"optimizer": "adamw:beta2_half_life=6e4,tau=12800", "ema": "half_life:images=1000"},
    "EMA of the study": {"ema": "warmup_power:power=0.66,update_every=10,start_update=100", "max_train_steps": 10_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_all_are_silent_on_what_is_good(tmp_path, name):
    assert run_checks(make_trainer(tmp_path, **GOOD[name])) == {}


def test_all_are_silent_on_good_images_and_shuffled_streams(tmp_path):
    labels = np.random.default_rng(0).permutation(200) // 40
    assert "sorted_stream" not in run_checks(make_trainer(tmp_path, **stream_of(tmp_path, labels)))
    assert run_checks(make_trainer(tmp_path, **with_images(tmp_path, noise))) == {}


def test_every_check_was_made_to_fire():
    assert set(CHECKS) == {*DESERVED, "model_and_scheduler", "dead_parameters"}


def test_a_model_from_a_pipeline_that_was_trained_otherwise(tmp_path):
    (tmp_path / "pipeline" / "unet").mkdir(parents=True)
    (tmp_path / "pipeline" / "scheduler").mkdir()
    (tmp_path / "pipeline" / "unet" / "config.json").write_text(json.dumps(runs.TINY_UNET))
    saved = tmp_path / "pipeline" / "scheduler" / "scheduler_config.json"
    options = {"model_config_name_or_path": str(tmp_path / "pipeline" / "unet")}
    saved.write_text(json.dumps({"prediction_type": "epsilon", "num_train_timesteps": 1000, "beta_schedule": "linear"}))
    assert run_checks(make_trainer(tmp_path, **options)) == {}
    saved.write_text(json.dumps({"prediction_type": "v_prediction", "num_train_timesteps": 1000}))
    message = run_checks(make_trainer(tmp_path, **options))["model_and_scheduler"]
    assert "has prediction_type='v_prediction', this run has --prediction_type epsilon" in message


def test_parameters_without_a_gradient_frozen_ones_and_broken_ones(tmp_path):
    trainer = make_trainer(tmp_path)
    model = trainer.run.model
    torch.nn.init.zeros_(model.conv_out.weight)  # a layer that begins at zero is not dead
    assert run_checks(trainer) == {}
    model.conv_in.requires_grad_(False)
    assert run_checks(trainer)["dead_parameters"] == "2 parameters of the model are frozen."
    model.requires_grad_(False)
    assert "no trainable parameter" in run_checks(trainer)["dead_parameters"]
    model.requires_grad_(True)
    model.register_parameter("spare", torch.nn.Parameter(torch.zeros(3)))
    assert run_checks(trainer)["dead_parameters"].startswith("No gradient reaches 1 of ")
    assert ": spare. They will keep" in run_checks(trainer)["dead_parameters"]
    with torch.no_grad():
        model.conv_in.weight.fill_(float("nan"))
    assert "is not finite" in run_checks(trainer)["dead_parameters"]


def test_a_rate_far_from_what_the_finder_found(tmp_path):
    (tmp_path / "run" / "lrlab").mkdir(parents=True)
    file = tmp_path / "run" / "lrlab" / "lr_finder.json"
    trainer = make_trainer(tmp_path)
    about = {"deciding": deciding(trainer.run.config.to_dict(), trainer.run.plan.num_parameters, 64)}
    found = {"learning_rate": 3e-5, "about": about, "sweeps": [], "seconds": 1.0, "suggestion": {"reason": "it is"}}
    file.write_text(json.dumps(found))
    assert "is 33.3 times the 3e-05 that the finder suggests" in run_checks(trainer)["learning_rate"]
    of_another_run = found | {"about": {"deciding": {**about["deciding"], "global_batch": 32}}}
    others = (found | {"learning_rate": 3e-4}, found | {"learning_rate": None}, of_another_run, {"learning_rate": 3e-5})
    for text in (*map(json.dumps, others), "{"):
        file.write_text(text)
        assert run_checks(trainer) == {}


def test_an_image_that_cannot_be_read_ends_no_check(tmp_path):
    options = with_images(tmp_path, noise) | {"in_memory_limit_mb": 0, "train_batch_size": 8}
    (tmp_path / "images" / "000.png").write_bytes(b"no image")
    trainer = make_trainer(tmp_path, **options, skip_corrupt_images=True)
    assert run_checks(trainer) == {}


def test_streams_are_checked_by_what_is_held_out(tmp_path):
    options = with_images(tmp_path, lambda n: noise(n) % 2) | {"streaming": True, "num_validation_images": 12}
    assert "values from -1 to -0.992" in run_checks(make_trainer(tmp_path, **options))["value_range"]


@pytest.mark.slow
def test_messages_are_told_once_and_recorded_and_change_nothing(tmp_path):
    options = [*runs.tiny_arguments(tmp_path, 0.1, preflight=True), "--max_train_steps=4", "--train_batch_size=4"]
    options += ["--lr_warmup_steps=2"]
    told = runs.run(*options, f"--output_dir={tmp_path / 'checked'}", processes=2)
    assert told.count("warning: Warm-up takes 2 of 4 updates") == 1
    assert "[warmup_share]" in told
    assert list(runs.read_record(tmp_path / "checked")["train"]["preflight"]) == ["warmup_share"]
    told = runs.run(*options, f"--output_dir={tmp_path / 'unchecked'}", "--no_preflight", processes=2)
    assert "warning" not in told
    assert runs.read_record(tmp_path / "unchecked")["train"]["preflight"] == {}
    checked, unchecked = tmp_path.glob("*checked/unet/diffusion_pytorch_model.safetensors")
    assert checked.read_bytes() == unchecked.read_bytes()


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """What `lrlab plan` shows, which writes nothing."""
    monkeypatch.chdir(tmp_path)
    few = ["--num_validation_images=100", "--distance_samples=50", "--num_inference_steps=8", "--eval_batch_size=20"]

    def shown(*options):
        AcceleratorState._reset_state(reset_partial_state=True)
        assert main(["plan", "--dataset_name=moons", *few, *options]) == 0
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out

    return shown


def test_the_parts_are_multiplied(plan, monkeypatch):
    """With made-up seconds; everything else is of a real plan."""
    monkeypatch.setattr(forecast, "_seconds_of_updates", lambda trainer: (9.0, 0.25))
    monkeypatch.setattr(forecast, "seconds_of_validation", lambda trainer: 2.0)
    monkeypatch.setattr(forecast, "_seconds_of_samples", lambda trainer, num: num / 2)
    shown = plan("--max_train_steps=400", "--validation_steps=100", "--checkpointing_steps=100", "--keep_every=200")
    # 4 previews and the end show 20 each, and 50 are measured.
    assert "time  3.05 min: training 100 s, validation 8 s, sampling 75 s" in shown
    assert "250 ms per update, 1,024 points per second" in shown
    # Weights and their average; no update has given the optimizer a state.
    assert "disk  7.9 MiB, with 3 checkpoints of 2.3 MiB" in shown


def test_it_is_measured(plan):
    shown = plan("--max_train_steps=50", "--train_batch_size=32")
    for part in (" memory  ", "at the peak of these updates", " ms per update", "training ", "validation ", "sampling "):
        assert part in shown


@pytest.mark.parametrize(("seconds", "expected"), [(60.0, forecast._UPDATES), (0.0, 1)], ids=["fast", "slow"])
def test_slow_updates_are_timed_fewer_times(seconds, expected, plan, monkeypatch):
    monkeypatch.setattr(forecast, "_MOST_SECONDS", seconds)
    timed = []
    monkeypatch.setattr(forecast, "_time_in_words", lambda trainer: f"{forecast._seconds_of_updates(trainer)}")
    monkeypatch.setattr(forecast, "_disk_in_words", lambda trainer: timed.append(trainer.run.update) or "disk")
    plan("--max_train_steps=50", "--train_batch_size=32")
    assert timed == [expected]


def test_updates_that_diverge_leave_the_rest(plan, monkeypatch):
    def diverge(trainer):
        raise Diverged("The loss is not finite.")

    monkeypatch.setattr(forecast, "_seconds_of_updates", diverge)
    shown = plan("--max_train_steps=50")
    assert "No forecast of the time, as the timed updates diverged: The loss is not finite." in shown
    assert " disk  " in shown


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_bit(tmp_path):
    weights = []
    for flags in ([], ["--gradient_checkpointing"]):
        arguments = [*runs.tiny_arguments(tmp_path, 0.2), "--max_train_steps=3", "--train_batch_size=8", *flags]
        runs.run(*arguments, f"--output_dir={tmp_path / str(len(flags))}")
        weights.append((tmp_path / str(len(flags)) / "unet/diffusion_pytorch_model.safetensors").read_bytes())
    assert weights[0] == weights[1]
