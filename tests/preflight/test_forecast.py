"""What `lrlab plan` and `--dry_run` say that a run will cost, from its first updates."""

import pytest
import runs
from accelerate.state import AcceleratorState

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import Diverged
from diffusers_lrlab.preflight import forecast

FEW = ["--num_validation_images=100", "--distance_samples=50", "--num_inference_steps=8", "--eval_batch_size=20"]


def plan(*options):
    AcceleratorState._reset_state(reset_partial_state=True)
    return main(["plan", "--dataset_name=moons", *FEW, *options])


def test_the_parts_are_multiplied(tmp_path, monkeypatch, capsys):
    """With made-up seconds; everything else is of a real plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "_seconds_of_updates", lambda trainer: (9.0, 0.25))
    monkeypatch.setattr(forecast, "seconds_of_validation", lambda trainer: 2.0)
    monkeypatch.setattr(forecast, "_seconds_of_samples", lambda trainer, num: num / 2)
    assert plan("--max_train_steps=400", "--validation_steps=100", "--checkpointing_steps=100", "--keep_every=200") == 0
    shown = capsys.readouterr().out
    # 4 previews and the end show 20 each, and 50 are measured.
    assert "time  3.05 min: training 100 s, validation 8 s, sampling 75 s" in shown
    assert "250 ms per update, 1,024 points per second" in shown
    # Weights and their average; no update has given the optimizer a state.
    assert "disk  7.9 MiB, with 3 checkpoints of 2.3 MiB" in shown
    assert list(tmp_path.iterdir()) == []


def test_it_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert plan("--max_train_steps=50", "--train_batch_size=32") == 0
    shown = capsys.readouterr().out
    for part in (" memory  ", "at the peak of these updates", " ms per update", "training ", "validation ", "sampling "):
        assert part in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seconds", "expected"), [(60.0, forecast._UPDATES), (0.0, 1)], ids=["fast", "slow"])
def test_slow_updates_are_timed_fewer_times(seconds, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "_MOST_SECONDS", seconds)
    timed = []
    monkeypatch.setattr(forecast, "_time_in_words", lambda trainer: f"{forecast._seconds_of_updates(trainer)}")
    monkeypatch.setattr(forecast, "_disk_in_words", lambda trainer: timed.append(trainer.run.update) or "disk")
    assert plan("--max_train_steps=50", "--train_batch_size=32") == 0
    assert timed == [expected]


def test_updates_that_diverge_leave_the_rest(tmp_path, monkeypatch, capsys):
    def diverge(trainer):
        raise Diverged("The loss is not finite.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast, "_seconds_of_updates", diverge)
    assert plan("--max_train_steps=50") == 0
    shown = capsys.readouterr().out
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
