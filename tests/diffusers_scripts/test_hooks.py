"""All hooks at once in each of diffusers' scripts that are run, and each hook's numbers by other means: `beside.py`."""

import json
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from diffusers_lrlab import get_timestep_sampler
from diffusers_lrlab.core.streams import stream_generator

from . import test_scripts
from .cases import command
from .test_scripts import EXAMPLES, IN_TURN, inputs, run  # noqa: F401

pytestmark = test_scripts.pytestmark
UPDATES, ACCUMULATION = 12, 2
OPTIONS = (
    *("--strict", "--fix_lr_clock", "--strict_lr_audit", "--timestep_sampler=logit_normal", "--loss_weighting=min_snr"),
    *("--ema=warmup_power", "--optimizer=lion", f"--import={Path(__file__).parent / 'beside.py'}"),
)


def shows_losses(case):
    """Scripts for flow matching show no losses of single images."""
    return "dreambooth" not in case.name


@pytest.fixture(scope="module", params=IN_TURN)
def whole(request, tmp_path_factory, inputs):  # noqa: F811
    """A script's run, and what was noted beside it."""
    case, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    (folder / "out").mkdir()
    noted = {"BESIDE": str(folder / "beside"), "BESIDE_UPDATES": str(UPDATES)}
    own = command(case, EXAMPLES, inputs, folder / "out", UPDATES, ACCUMULATION, batch_size=1)
    own[own.index("--checkpointing_steps") + 1] = "4"
    done = run(own, [*OPTIONS, *["--log_timesteps"] * shows_losses(case)], **noted)
    assert done.returncode == 0, done.stderr[-3000:]
    rows, updates = (json.loads((folder / "beside" / f"{name}.json").read_text()) for name in ("rows", "updates"))
    average = load_file(folder / "beside" / "ema.safetensors")
    return SimpleNamespace(case=case, folder=folder / "out", said=done.stderr, rows=rows, updates=updates, average=average)


def test_timesteps_and_losses(whole):
    """Every draw is the sampler's, and every loss is that of the errors by the weights' formula."""
    sampler = get_timestep_sampler("logit_normal", 1000)
    batches = [
        sampler.sample(ACCUMULATION, update, stream_generator(0, "timesteps", update)).tolist() for update in range(UPDATES)
    ]
    assert [row["timesteps"] for row in whole.rows] == [[timestep] for batch in batches for timestep in batch]
    for row in whole.rows:
        assert row["loss"] == pytest.approx(row["expected_loss"], rel=1e-4)
    assert f"--timestep_sampler logit_normal: timesteps of {len(whole.rows)} batches replaced." in whole.said
    assert f"--loss_weighting min_snr: {len(whole.rows)} losses weighted." in whole.said


def test_the_log(whole):
    """The losses of images by level, before weights."""
    if not shows_losses(whole.case):
        pytest.skip("it shows no losses of single images")
    rows = {row["bin"]: row for row in pq.read_table(whole.folder / "lrlab" / "timesteps.parquet").to_pylist()}
    bins = np.array([row["timesteps"][0] // 100 for row in whole.rows])
    losses = np.array([row["errors"][0] for row in whole.rows])
    assert [*rows] == [*range(10)]
    for level, row in rows.items():
        values = losses[bins == level]
        assert (row["num_samples"], row["loss_mean"] is None) == (len(values), not len(values))
        assert not len(values) or row["loss_mean"] == pytest.approx(values.mean(), rel=1e-4), level
    assert (whole.folder / "lrlab" / "timesteps.png").exists()


def test_the_clock_and_the_optimizer(whole):
    """Cosine after 2 updates of warm-up, in updates; with the same gradients, Lion by hand has the same weights."""
    done = np.arange(UPDATES)
    share = np.where(done < 2, done / 2, 0.5 + np.cos(np.pi * (done - 2) / (UPDATES - 2)) / 2)
    np.testing.assert_allclose([update["lrs"] for update in whole.updates], 1e-3 * share[:, None], atol=1e-12)
    assert [update["differ"] for update in whole.updates] == [[]] * UPDATES
    assert f"LR audit: {UPDATES} updates, every value that follows the clock was as expected." in whole.said
    assert "--optimizer: lion trained " in whole.said


def loaded(folder, pipeline, case):
    """The trained weights as diffusers loads them, by their names in the script."""
    if "lora" not in case.name:
        folder = folder if "controlnet" in case.name else folder / "unet"
        folder = folder if (folder / "config.json").exists() else folder / "controlnet"
        kind = json.loads((folder / "config.json").read_text())["_class_name"]
        return dict(getattr(diffusers, kind).from_pretrained(folder).named_parameters())
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    pipe.load_lora_weights(folder)
    model = pipe.transformer if hasattr(pipe, "transformer") else pipe.unet
    weights = {key.replace("default_0", "default"): value for key, value in model.named_parameters()}
    return {key: value for key, value in weights.items() if "lora" in key}


def test_the_average_loads_and_is_that_of_diffusers(whole, inputs):  # noqa: F811
    assert f"--ema warmup_power: the average of {UPDATES} updates is in" in whole.said
    assert ("pipeline.load_lora_weights(" in whole.said) == ("lora" in whole.case.name)
    pipeline = inputs / whole.case.pipeline / "pipeline"
    average = loaded(whole.folder / "lrlab" / "ema", pipeline, whole.case)
    assert average.keys() == whole.average.keys()
    assert [key for key, value in whole.average.items() if not average[key].equal(value)] == []
    assert len(load_file(whole.folder / "checkpoint-4" / "lrlab" / "ema.safetensors")) == len(average)
