"""Snapshots of post-hoc averages: written on schedule, resumed to the bit, refused elsewhere."""

import filecmp

import helpers
import numpy as np
import pytest
import torch
from tables import cases

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.averaging.averages import EMA
from diffusers_lrlab.averaging.forms import EMAForm
from diffusers_lrlab.averaging.posthoc import read_snapshots
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.training.resolve import resolve_config
from diffusers_lrlab.training.run_folder import SNAPSHOTS, RunFolder

MODEL = {"dimension": 2, "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
SMALL = {"dataset_name": "moons", "max_train_steps": 12, "train_batch_size": 32, "num_validation_images": 16}
SMALL |= {"logging_steps": 4, "validation_steps": 100, "log_timestep_bins": 2, "checkpointing_steps": 5}
SMALL |= {"ddpm_num_steps": 4, "num_inference_steps": 2, "save_images_epochs": 10**6}
POSTHOC = "posthoc:sigma_rels=[0.1|0.2],snapshots=3"


def make_trainer(folder, **options):
    return helpers.make_trainer(folder, {**SMALL, "ema": POSTHOC, **options}, MODEL)


def do_updates(trainer, number):
    updates = trainer.updates(show_progress=False)
    for _ in range(number):
        next(updates)
    trainer.checkpoints.finish()
    updates.close()


def weights_of(average):
    return [value.clone() for value in average.shadow_params]


def test_snapshots_hold_the_averages_at_their_updates(tmp_path):
    trainer, expected = make_trainer(tmp_path), {}
    run = trainer.run
    beside = EMA(run.trained, EMAForm.of("power_function:sigma_rel=0.2"))  # one that is really run
    for update in trainer.updates(show_progress=False):
        beside.advance(update)
        expected[update] = [weights_of(run.average), weights_of(beside)]
    found = read_snapshots(tmp_path / SNAPSHOTS)
    assert [(one.update, one.end, one.sigma_rels) for one in found] == [(n, n, [0.1, 0.2]) for n in (4, 8, 12)]
    names = [name for name, _ in run.model.named_parameters()]
    for one in found:
        assert one.shapes() == {name: tuple(value.shape) for name, value in run.model.named_parameters()}
        for track in range(2):
            into = {name: torch.zeros_like(value) for name, value in run.model.named_parameters()}
            one.read(np.eye(2)[track], into)
            assert all(map(torch.equal, (into[name] for name in names), expected[one.update][track]))


def files_of(folder):
    return sorted(path.relative_to(folder) for path in (folder / SNAPSHOTS).rglob("*") if path.is_file())


def test_resumed_to_the_bit(tmp_path):
    """Stopped after a snapshot that no checkpoint has: it is taken again, and is the same."""
    options = {"ema": f"{POSTHOC},dtype=bf16"}
    whole, first = make_trainer(tmp_path / "whole", **options), make_trainer(tmp_path / "parts", **options)
    do_updates(whole, 12)
    do_updates(first, 9)
    assert len(files_of(tmp_path / "parts")) == 2 * 3
    second = make_trainer(tmp_path / "parts", **options)
    second.resume(tmp_path / "parts" / "checkpoint-5")
    assert len(files_of(tmp_path / "parts")) == 1 * 3  # that of update 8 comes later
    do_updates(second, 7)
    assert len(second.run.averages) == 2
    for one, other in zip(whole.run.averages, second.run.averages, strict=True):
        assert all(map(torch.equal, one.shadow_params, other.shadow_params))
    names = files_of(tmp_path / "whole")
    assert names == files_of(tmp_path / "parts")
    assert len(names) == 3 * 3
    assert filecmp.cmpfiles(tmp_path / "whole", tmp_path / "parts", names, shallow=False) == (names, [], [])
    folders = {path.name for path in (tmp_path / "parts" / "checkpoint-12").iterdir() if path.is_dir()}
    assert folders == {"denoiser", "denoiser_ema", "denoiser_ema_2"}


def test_a_new_run_removes_snapshots_of_the_old_one_and_nothing_else(tmp_path):
    do_updates(make_trainer(tmp_path), 12)
    (tmp_path / SNAPSHOTS / "mine.txt").write_text("mine")
    folder = RunFolder(tmp_path)
    folder.clear()
    assert [path.name for path in (tmp_path / SNAPSHOTS).iterdir()] == ["mine.txt"]


WRONG = {
    "posthoc:sigma_rels=[0.1|0.1]": "one or more different widths",
    "posthoc:sigma_rels=[0.1|0.3]": "numbers in .1e-5, 0.2886",
}


@cases(("spec", "reason"), WRONG.items())
def test_wrong_specs_are_refused(spec, reason):
    with pytest.raises(LabError, match=reason):
        resolve_config(TrainingConfig(ema=spec))


def test_a_run_too_short_for_its_snapshots_is_refused(tmp_path):
    with pytest.raises(LabError, match="takes 16 snapshots, .* and the run has 12 updates"):
        make_trainer(tmp_path, ema="posthoc")
