"""
All hooks at once in each of diffusers' scripts that are run, and each hook's numbers by other means: `beside.py`.

Then the script is killed at a random instant and started again, with all of them.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from diffusers_lrlab import get_timestep_sampler
from diffusers_lrlab.core.streams import stream_generator

from . import test_scripts
from .cases import command, run
from .test_resume import KILLED, KILLS, end_of, last_start
from .test_scripts import EXAMPLES, IN_TURN, inputs  # noqa: F401

pytestmark = test_scripts.pytestmark
UPDATES, ACCUMULATION, GRADIENTS_EVERY = 12, 2, 4
OPTIONS = (
    *("--strict", "--fix_lr_clock", "--strict_lr_audit", "--exact_resume", "--timestep_sampler=logit_normal"),
    *("--loss_weighting=min_snr", "--log_timesteps", f"--timestep_grad_every={GRADIENTS_EVERY}"),
    *("--ema=warmup_power", "--optimizer=lion"),
)
# A validation, which is to show the average.
SHOWN = ("--validation_prompt=a red square", "--num_validation_images=1", "--validation_epochs=1")


def start(case, inputs, folder, *options, **changed):  # noqa: F811
    own = command(case, EXAMPLES, inputs, folder, UPDATES, ACCUMULATION, batch_size=1)
    own[own.index("--checkpointing_steps") + 1] = "1"
    validates = case.name == "text_to_image_lora"
    options = [*OPTIONS, f"--lr_groups={'*.lora_A.*' if 'lora' in case.name else '*.bias'}=0.5", *options]
    options.append(f"--ema_swap={'both' if validates else 'final'}")
    return run([*own, *(SHOWN if validates else ()), "--resume_from_checkpoint=latest"], options, **changed)


@pytest.fixture(scope="module", params=IN_TURN)
def whole(request, tmp_path_factory, inputs):  # noqa: F811
    """A script that was never killed, and what was noted beside it."""
    case, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    (folder / "out").mkdir()
    noted = {"BESIDE": str(folder / "beside"), "BESIDE_UPDATES": str(UPDATES)}
    done = start(case, inputs, folder / "out", f"--import={Path(__file__).parent / 'beside.py'}", **noted)
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
    assert f"--timestep_sampler logit_normal: {len(whole.rows)} draws of timesteps replaced." in whole.said
    assert f"--loss_weighting min_snr: {len(whole.rows)} losses weighted." in whole.said


def test_the_log(whole):
    """Losses and gradient norms by level: of images before weights, or of micro-batches, where only these are seen."""
    rows = pq.read_table(whole.folder / "lrlab" / "timesteps.parquet").to_pylist()
    losses_by_bin = {row["bin"]: row for row in rows if row["num_samples"] is not None}
    norms_by_bin = {row["bin"]: row["grad_norm"] for row in rows if row["grad_norm"] is not None}
    is_per_image = "by losses of images" in whole.said
    assert is_per_image == ("dreambooth" not in whole.case.name)
    loss, norm = ("errors", "grad_norm_of_errors") if is_per_image else ("loss", "grad_norm_of_loss")
    bins = np.array([row["timesteps"][0] // 100 for row in whole.rows])
    losses = np.array([np.mean(row[loss]) for row in whole.rows])
    measured = np.array([place // ACCUMULATION % GRADIENTS_EVERY == 0 for place in range(len(bins))])
    norms = np.array([row[norm] for row in whole.rows])
    assert len(rows) == 20
    for level in range(10):
        of_level = bins == level
        assert losses_by_bin[level]["num_samples"] == of_level.sum()
        for seen, values in (
            (losses_by_bin[level]["loss_mean"], losses[of_level]),
            (norms_by_bin.get(level), norms[measured & of_level]),
        ):
            assert (seen is None) == (not len(values)), level
            assert not len(values) or seen == pytest.approx(values.mean(), rel=1e-4), level
    assert (whole.folder / "lrlab" / "timesteps.png").exists()


def test_the_clock_and_the_optimizer(whole):
    """Cosine after 2 updates of warm-up, in updates; with the same gradients, Lion by hand has the same weights."""
    done = np.arange(UPDATES)
    share = np.where(done < 2, done / 2, 0.5 + np.cos(np.pi * (done - 2) / (UPDATES - 2)) / 2)
    rates = [[*update["lrs"]] if share[n] else [0, 0] for n, update in enumerate(whole.updates)]
    np.testing.assert_allclose(rates, 1e-3 * np.stack([share, share / 2], 1), atol=1e-12)
    assert [update["differ"] for update in whole.updates] == [[]] * UPDATES
    assert f"LR audit: {UPDATES} updates, every value that follows the clock was as expected." in whole.said
    assert "with learning rate factors " in whole.said


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
    pipeline = inputs / whole.case.pipeline / "pipeline"
    average = loaded(whole.folder / "lrlab" / "ema", pipeline, whole.case)
    assert average.keys() == whole.average.keys()
    assert [key for key, value in whole.average.items() if not average[key].equal(value)] == []
    published = loaded(whole.folder, pipeline, whole.case)
    assert [key for key, value in average.items() if not published[key].equal(value)] == []
    earlier = loaded(whole.folder / "checkpoint-4" / "lrlab" / "ema", pipeline, whole.case)
    assert earlier.keys() == average.keys()


def test_killed_at_random_instants(tmp_path, whole, inputs):  # noqa: F811
    """All hooks end where they would have: weights, average, state of the optimizer, and the log."""
    instants = random.Random(whole.case.name)
    for _ in range(KILLS):
        done = start(whole.case, inputs, tmp_path, KILL_AFTER_SECONDS=str(instants.uniform(0.1, 1.0)))
        assert done.returncode in (0, *KILLED), done.stderr[-3000:]
    last_start(lambda folder: start(whole.case, inputs, folder), tmp_path)
    expected, killed = end_of(whole.folder), end_of(tmp_path)
    assert killed.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(value, killed[key])] == []
    log, expected = (pq.read_table(folder / "lrlab" / "timesteps.parquet") for folder in (tmp_path, whole.folder))
    assert str(log.to_pydict()) == str(expected.to_pydict())  # NaN is like NaN here
