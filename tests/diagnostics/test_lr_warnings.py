"""Signs of a bad learning rate: each in a log made to show it, none in good ones."""

import numpy as np
import pytest
import runs
from tables import cases

from diffusers_lrlab.diagnostics.lr_warnings import find_lr_warnings

NUM = 100


def log(losses, norms=0.3, spikes=()):
    """A row every 10 updates."""
    values = enumerate(np.broadcast(losses, norms), 1)
    rows = [
        {"update": 10 * index, "loss": float(loss), "lr": 1e-3, "grad_norm": float(norm)} for index, (loss, norm) in values
    ]
    for index, place in spikes:
        rows[index]["loss_spike_bins"] = [place]
    return rows


def signs(losses, **options):
    return find_lr_warnings(log(losses, **options), 50, 10 * NUM, 1.0)


X = np.arange(NUM)
GOOD = 0.1 + np.exp(-X / 10)


def test_good_logs_and_noise_alone_have_none():
    scales = (0.02, 0.1, 0.2)
    noisy = [GOOD * (1 + scale * np.random.default_rng(seed).standard_normal(NUM)) for seed in range(5) for scale in scales]
    for losses in (GOOD, GOOD[:45], np.where(X % 17 == 3, 5, GOOD), *noisy):
        assert signs(losses) == {}


@cases(("losses", "name", "part"), [
    (np.full(NUM, 1.0), "not_falling", "has not fallen: 1 in the first rows, 1 at update 1000, learning rate 0.001"),
    (np.where(X < 50, GOOD, 0.3), "rising", "has risen from 0.1"),
    (GOOD * (1 + np.where(X > 70, 0.3, 0.01) * (-1.0) ** X), "swinging", "times as much as in calmer rows"),
    (GOOD * (1 + 0.6 * (-1.0) ** X), "swinging", "% from row to row at update 1000, learning rate 0.001. Lower"),
])  # fmt: skip
def test_bad_logs_have_theirs(losses, name, part):
    found = signs(losses)
    assert list(found) == [name]
    assert part in found[name]


def test_clipping_and_spikes():
    assert "their norm is 3, --max_grad_norm 1" in signs(GOOD, norms=3.0)["clipped"]
    assert signs(GOOD, norms=np.where(X % 2, 3.0, 0.5)) == {}
    assert find_lr_warnings(log(GOOD, norms=3.0), 50, 1000, 0.0) == {}
    found = signs(GOOD, spikes=[(30, 2), (40, 0), (50, 2), (60, 2), (70, 1)])["spikes"]
    assert "5 rows of the log with loss spikes so far, mostly in bin 2" in found
    assert signs(GOOD, spikes=[(30, 2)]) == {}
    one_bad_batch = log(GOOD)
    one_bad_batch[30]["loss_spike_bins"] = [0, 1, 2, 3, 4, 5]
    assert find_lr_warnings(one_bad_batch, 50, 10 * NUM, 1.0) == {}


def test_logs_that_say_nothing_yet():
    assert find_lr_warnings(log(np.where(X < 50, GOOD, 0.3)), 50, 1000, 1.0, still=False) == {}  # a curriculum may rise
    late = [row | {"update": 1000 * row["update"]} for row in log(np.full(NUM, 0.1))]  # it may have fallen before
    assert find_lr_warnings(late, 50, 1_000_000, 1.0) == {}
    level = log(np.full(NUM, 1.0))
    assert find_lr_warnings(level[:39], 50, 1000, 1.0) == {}
    assert find_lr_warnings(level[:45], 300, 1000, 1.0) == {}
    assert find_lr_warnings(level[:45], 50, 10_000, 1.0) == {}
    assert find_lr_warnings([{"update": 10, "validation_loss": 1.0}] * 100, 0, 1000, 1.0) == {}


@pytest.mark.slow
def test_a_run_tells_records_and_prints_them(tmp_path):
    options = [*runs.tiny_arguments(tmp_path), "--max_train_steps=60", "--train_batch_size=8", "--learning_rate=1e-9"]
    told = runs.run(*options, "--lr_scheduler=constant", f"--output_dir={tmp_path / 'run'}")
    assert told.count("learning-rate warning: The loss has not fallen") == 1
    assert "not_falling" in runs.read_record(tmp_path / "run")["train"]["warnings"]
    assert "Learning-rate warning: The loss has not fallen" in (tmp_path / "run/README.md").read_text()
