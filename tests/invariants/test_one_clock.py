"""One clock and batch split: how an update's images are shared out changes neither schedule, timesteps nor gradient."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import runs
import torch
from continued_runs import load_state
from safetensors.numpy import load_file
from tables import cases

from diffusers_lrlab import LabError, TrainingConfig
from diffusers_lrlab.training.resolve import resolve_config

pytestmark = pytest.mark.slow

NUM_UPDATES, WARMUP, PEAK = 12, 3, 2e-3

# (processes, accumulation, micro-batch), all of 16 images an update
LAYOUTS = [(1, 1, 16), (1, 4, 4), (2, 1, 8), (2, 2, 4)]


def cosine(update):
    """diffusers' cosine schedule, from its definition."""
    if update < WARMUP:
        return PEAK * update / WARMUP
    return PEAK * 0.5 * (1 + np.cos(np.pi * (update - WARMUP) / (NUM_UPDATES - WARMUP)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One run for each layout."""
    base = tmp_path_factory.mktemp("layouts")
    return {layout[:2]: run_in(base, *layout) for layout in LAYOUTS}


def run_in(base, processes, accumulation, micro_batch, run=runs.run):
    """The folder of a run of this layout."""
    folder = base / f"{processes}-{accumulation}"
    layout = {"train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation, "output_dir": folder}
    length = {"max_train_steps": NUM_UPDATES, "lr_warmup_steps": WARMUP, "checkpointing_steps": NUM_UPDATES}
    run(*runs.tiny_arguments(base, learning_rate=PEAK, **layout, **length), *runs.FOLLOWING, processes=processes)
    return folder


def test_accelerate_launch_starts_the_same_run(folders, tmp_path):
    """Of two processes, which import everything themselves."""
    launched = run_in(tmp_path, 2, 1, 8, run=runs.launch)
    assert (launched / "lrlab/metrics.jsonl").read_text() == (folders[2, 1] / "lrlab/metrics.jsonl").read_text()
    for name in ("unet", f"checkpoint-{NUM_UPDATES}/unet"):
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert (launched / file).read_bytes() == (folders[2, 1] / file).read_bytes()


@cases("layout", [layout[:2] for layout in LAYOUTS])
def test_the_curve_is_the_one_asked_for(folders, layout):
    rows, _ = runs.read_metrics(folders[layout])
    assert [row["update"] for row in rows] == list(range(NUM_UPDATES))
    np.testing.assert_allclose([row["lr"] for row in rows], [cosine(n) for n in range(NUM_UPDATES)], rtol=1e-12)
    assert rows[WARMUP]["lr"] == PEAK == max(row["lr"] for row in rows)
    assert [row["images_seen"] for row in rows] == [16 * (n + 1) for n in range(NUM_UPDATES)]
    assert runs.read_record(folders[layout])["train"]["schedule_audit"]["largest_lr_deviation"] == 0


@cases("layout", [layout[:2] for layout in LAYOUTS[1:]])
def test_losses_gradients_and_weights_agree(folders, layout):
    """In float32 the order of summation differs, and Adam divides small differences by small numbers."""
    reference, rows = runs.read_metrics(folders[1, 1]), runs.read_metrics(folders[layout])
    for key, rtol in (("loss", 1e-4), ("unweighted_loss", 1e-4), ("grad_norm", 1e-3)):
        np.testing.assert_allclose([row[key] for row in rows[0]], [row[key] for row in reference[0]], rtol=rtol, err_msg=key)
    for key in ("validation_loss", "validation_loss_ema"):
        np.testing.assert_allclose([row[key] for row in rows[1]], [row[key] for row in reference[1]], rtol=1e-4)
    checkpoint = f"checkpoint-{NUM_UPDATES}"
    part = f"{checkpoint}/unet/diffusion_pytorch_model.safetensors"
    expected, weights = load_file(folders[1, 1] / part), load_file(folders[layout] / part)
    for name, value in expected.items():
        # Attention ignores a constant added to all keys: that gradient is rounding noise, which Adam makes large.
        if not name.endswith("to_k.bias"):
            np.testing.assert_allclose(weights[name], value, atol=2e-3 * PEAK * NUM_UPDATES, err_msg=name)
    gradients = [mean_gradient(folders[key] / checkpoint) for key in ((1, 1), layout)]
    assert torch.linalg.norm(gradients[0] - gradients[1]) < 1e-3 * torch.linalg.norm(gradients[0])


@cases("layout", [layout[:2] for layout in LAYOUTS[1:]])
def test_timesteps_agree(folders, layout):
    expected, found = (pq.read_table(folders[key] / "lrlab/timesteps.parquet").to_pandas() for key in ((1, 1), layout))
    expected, found = (rows[rows.num_samples.notna()] for rows in (expected, found))
    assert len(expected) == 4 * NUM_UPDATES
    for key in ("update", "bin", "num_samples", "share"):
        np.testing.assert_array_equal(found[key], expected[key])
    assert (found.groupby("update").num_samples.sum() == 16).all()
    for key in ("asked_share", "loss_mean", "loss_variance"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-3, atol=1e-6)


def mean_gradient(checkpoint):
    """AdamW's first moment: the mean of the (clipped) gradients so far, latest most."""
    state = load_state(checkpoint)["optimizer"]["state"]
    return torch.cat([each["exp_avg"].flatten() for each in state.values()])


def test_epochs_give_the_same_clock(tmp_path):
    """1,781 training images in batches of 512: 2 epochs are ceil(2 * 1781 / 512) = 7 updates."""
    options = {"num_epochs": 2, "train_batch_size": 128, "gradient_accumulation_steps": 2, "lr_warmup_steps": 2}
    options |= {"lr_scheduler": "linear", "output_dir": tmp_path / "run"}
    runs.run(*runs.tiny_arguments(tmp_path, **options), processes=2)
    rows, _ = runs.read_metrics(tmp_path / "run")
    expected = np.array([0, 0.5, 1, 0.8, 0.6, 0.4, 0.2]) * 1e-3
    np.testing.assert_allclose([row["lr"] for row in rows], expected, rtol=1e-12)


def test_no_warm_up_starts_at_the_peak(tmp_path):
    options = {"max_train_steps": 2, "train_batch_size": 4, "lr_warmup_steps": 0, "output_dir": tmp_path / "run"}
    runs.run(*runs.tiny_arguments(tmp_path, **options))
    rows, _ = runs.read_metrics(tmp_path / "run")
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 0.5e-3], rel=1e-12)


def test_warm_up_of_the_whole_run_is_an_error():
    with pytest.raises(LabError, match="Warm-up of 5 updates does not fit into a run of 5 updates"):
        resolve_config(TrainingConfig(max_train_steps=5, lr_warmup_steps=5))
