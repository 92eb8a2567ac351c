"""Averages of finished runs: what `lrlab ema` writes and refuses."""

import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
from tables import cases

from diffusers_lrlab import PointDDPMPipeline, TrainingConfig, extend, train
from diffusers_lrlab.averaging.posthoc import Profiles, combine
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.hub.contents import contents_of
from diffusers_lrlab.run.check import check_folder

FIXTURE = Path(__file__).parents[1] / "compatibility" / "v0.1.0" / "run"
SMALL = {"_class_name": "MLPDenoiser", "hidden_size": 16, "num_layers": 1, "embedding_size": 8}
POINTS = {"dataset_name": "moons", "max_train_steps": 96, "train_batch_size": 64, "learning_rate": 1e-2}
POINTS |= {"num_validation_images": 256, "distance_samples": 64, "num_inference_steps": 3, "ddpm_num_steps": 20}
POINTS |= {"evaluation": False, "validation_steps": 96, "checkpointing_steps": 24, "checkpoints_total_limit": 0}
POINTS |= {"save_images_epochs": 10**6, "preflight": False, "logging_steps": 5, "lr_scheduler": "constant"}
WIDTHS = "posthoc:sigma_rels=[0.05|0.1],snapshots=12"


def points(folder, **options):
    config = folder.parent / "config.json"
    config.write_text(json.dumps(SMALL))
    return train(TrainingConfig(**{**POINTS, "model_config_name_or_path": str(config), **options}, output_dir=str(folder)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return points(tmp_path_factory.mktemp("posthoc") / "run", ema=WIDTHS)


def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def weights(folder, component="denoiser"):
    return runs.read_weights(folder / component)


def distance(one, other):
    """The norm of the difference of weights over that of the weights."""
    flat = [torch.cat([value.flatten() for _, value in sorted(each.items())]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in error
    return error


def test_a_width_after_the_run_is_close_to_the_average_that_was_run(run, tmp_path, capsys):
    assert main(["ema", str(run), "--sigma_rel", "0.075", "--out", str(tmp_path / "out")]) == 0
    assert "residual of the profile" in capsys.readouterr().out
    really_run, of_run = weights(points(tmp_path / "run", ema="power_function:sigma_rel=0.075")), weights(run)
    error, other = distance(weights(tmp_path / "out"), really_run), distance(of_run, really_run)
    assert error < 1e-3
    assert error < other / 20
    pipeline = PointDDPMPipeline.from_pretrained(tmp_path / "out")
    assert torch.equal(dict(pipeline.denoiser.named_parameters())["output.bias"], weights(tmp_path / "out")["output.bias"])
    about = json.loads((tmp_path / "out" / "average.json").read_text())
    assert sum(sum(one["coefficients"]) for one in about["snapshots"]) == pytest.approx(1)
    assert about["update"] == 96


def test_a_stored_width_is_the_stored_average(run, tmp_path):
    for width, component in (("0.05", "denoiser_ema"), ("0.1", "denoiser_ema_2")):
        assert main(["ema", str(run), "--sigma_rel", width, "--out", str(tmp_path / width)]) == 0
        assert distance(weights(tmp_path / width), weights(run / "checkpoint-96", component)) < 1e-6


def test_an_extended_run_has_the_averages_of_its_whole_history(run, tmp_path, capsys):
    """A damaged snapshot is told and left out."""
    parent = copy(run, tmp_path)
    (parent / "ema_snapshots" / "update-00000008" / "averages.safetensors").write_bytes(b"")
    extended = extend(parent, 120, output_dir=tmp_path / "longer")
    said = capsys.readouterr().err
    assert "The snapshot update-00000008 is damaged, and is not copied" in said
    updates = [int(path.name[7:]) for path in sorted((extended / "ema_snapshots").iterdir())]
    assert updates == [*range(16, 97, 8), 100, 110, 120]
    assert main(["ema", str(extended), "--sigma_rel", "0.2", "--out", str(tmp_path / "ema")]) == 0
    own = Profiles.of_widths([100, 100, 110, 110, 120, 120], 3 * [0.05, 0.1])
    without = combine(own, Profiles.of_widths([120], [0.2])).residual
    assert json.loads((tmp_path / "ema" / "average.json").read_text())["residual"] < without / 10


WRONG = {
    ("--sigma_rel", "0.04"): "at least 0.05, the smallest width of the snapshots",
    (): "the following arguments are required: --sigma_rel",
}


@cases(("arguments", "reason"), WRONG.items())
def test_what_a_run_cannot_give_is_refused(run, tmp_path, capsys, arguments, reason):
    assert reason in refused(capsys, "ema", run, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_snapshots_says_what_can_be_done(run, tmp_path, capsys):
    plain = copy(run, tmp_path)
    shutil.rmtree(plain / "ema_snapshots")
    error = refused(capsys, "ema", plain, "--sigma_rel", "0.1")
    assert "has no snapshots of averages (ema_snapshots/): the run took some, which are not here" in error
    assert "trained, or train again with `lrlab train ... --ema posthoc`." in error
    assert "it was not trained with `--ema posthoc`" in refused(capsys, "ema", FIXTURE, "--sigma_rel", "0.1")


def test_wide_averages_are_warned_about(run, tmp_path, capsys):
    assert main(["ema", str(run), "--sigma_rel", "0.28", "--out", str(tmp_path / "out")]) == 0
    assert "0.28 is above 0.25" in capsys.readouterr().err


def test_damaged_snapshots_are_found_and_none_are_uploaded(run, tmp_path, capsys):
    damaged = copy(run, tmp_path)
    assert not check_folder(damaged).damaged
    assert not [name for name in contents_of(damaged, "user/name").files if "ema_snapshots" in str(name)]
    snapshot = damaged / "ema_snapshots" / "update-00000048"
    (snapshot / "snapshot.json").write_text("{}")
    (found,) = check_folder(damaged).damaged
    assert str(snapshot / "snapshot.json") in found
    assert "or remove its folder" in refused(capsys, "ema", damaged, "--sigma_rel", "0.1", "--out", tmp_path / "out")
    shutil.rmtree(snapshot)
    assert main(["ema", str(damaged), "--sigma_rel", "0.1", "--out", str(tmp_path / "out")]) == 0
    assert len(json.loads((tmp_path / "out" / "average.json").read_text())["snapshots"]) == 11


@pytest.mark.slow
def test_two_processes_take_the_snapshots_of_one(tmp_path):
    """Up to rounding, as weights of theirs are."""
    small = [*runs.tiny_arguments(tmp_path), "--max_train_steps=4", "--no_evaluation", "--ema=posthoc:snapshots=2"]
    runs.run(*small, f"--output_dir={tmp_path / 'two'}", "--train_batch_size=16", processes=2)
    runs.run(*small, f"--output_dir={tmp_path / 'one'}", "--train_batch_size=32")
    for width in ("0.05", "0.15"):
        for name in ("one", "two"):
            assert main(["ema", str(tmp_path / name), "--sigma_rel", width, "--out", str(tmp_path / f"{name}-{width}")]) == 0
        pair = [weights(tmp_path / f"{name}-{width}", "unet") for name in ("one", "two")]
        assert distance(*pair) < 1e-5
