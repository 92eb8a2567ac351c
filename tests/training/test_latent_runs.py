"""Runs on latents: resumed, split, in two processes, sampled, decoded, measured; and what is refused."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import runs
import started
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DModel
from helpers import config, load_data, stacked
from latents import TINY_UNET, encode, save_vae
from tables import cases

import diffusers_lrlab
from diffusers_lrlab import LabError
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.latents import ROWS_FILE, read_latents_record
from diffusers_lrlab.data.options import BatchLayout
from diffusers_lrlab.training.model import given_model_config, model_class_of
from diffusers_lrlab.training.plan import make_plan
from diffusers_lrlab.training.plan_text import describe_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An autoencoder, digits encoded by it, and the configuration of a model of them."""
    place = tmp_path_factory.mktemp("place")
    save_vae(place / "vae")
    encode(place / "digits", place / "vae", flip=True)
    (place / "unet.json").write_text(json.dumps(TINY_UNET))
    return place


def train(place, output, *more, processes=1, **how):
    arguments = [
        f"--train_data_dir={place / 'digits'}",
        f"--output_dir={output}",
        f"--model_config_name_or_path={place / 'unet.json'}",
        "--max_train_steps=8",
        f"--train_batch_size={8 // processes}",
        *("--num_validation_images=16", "--validation_steps=4", "--checkpointing_steps=4", "--checkpoints_total_limit=0"),
        *("--eval_batch_size=2", "--num_inference_steps=2", "--logging_steps=1", "--no_preflight"),
        *("--distance_samples=0", *more),
    ]
    return runs.run(*arguments, processes=processes, **how)


@pytest.fixture(scope="module")
def straight(place, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight") / "run"
    train(place, output, "--distance_samples=20", "--num_validation_images=40", "--save_images_epochs=1")
    return output


def resolved(place, **options):
    given = {"train_data_dir": str(place / "digits"), "train_batch_size": 8, "num_validation_images": 16}
    return config(**given | options)


def test_batches_are_memory_mapped_and_the_same_with_workers_and_later(place):
    options, layout = resolved(place), BatchLayout(8)
    data = load_data(options)
    assert data.in_memory is None
    assert len(data.held_out) == 16
    assert data.num_images == 1797 - 16
    batches = stacked(iterate_batches(data, layout, 0, range(4)))
    assert batches.shape == (4, 8, 2, 4, 4)
    assert torch.equal(stacked(iterate_batches(data, layout, 0, range(2, 4), num_workers=1)), batches[2:])
    ranks = [BatchLayout(4, 1, 2, rank) for rank in (0, 1)]
    shares = [stacked(iterate_batches(data, each, 0, range(4))) for each in ranks]
    assert torch.equal(torch.cat(shares, dim=1), batches)
    epoch = len(data.train) // 8 + 1
    assert not torch.equal(stacked(iterate_batches(data, layout, 1, range(4))), batches)
    assert next(iterate_batches(data, layout, 0, range(epoch, epoch + 1))).data.isfinite().all()


def test_the_rows_of_images_are_held_out(place):
    latents = load_data(resolved(place))
    images = load_data(config(dataset_name="digits", num_validation_images=16))
    vae = AutoencoderKL.from_pretrained(place / "vae").eval()
    with torch.no_grad():
        means = vae.encode(images.held_out.data).latent_dist.mean
    torch.testing.assert_close(latents.held_out.data, (means - 0.1) * 0.9)


def test_samples_are_decoded_by_what_is_saved(straight, place):
    pipeline = DiffusionPipeline.from_pretrained(straight)
    assert type(pipeline) is diffusers_lrlab.ImagePipeline
    how = {"batch_size": 3, "num_inference_steps": 2}
    draws = [
        pipeline(**how, generator=torch.Generator().manual_seed(1), output_type=kind).images for kind in ("np", "latent")
    ]
    vae = AutoencoderKL.from_pretrained(place / "vae").eval()
    with torch.no_grad():
        expected = vae.decode(draws[1] / 0.9 + 0.1).sample
    expected = (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(draws[0], expected, atol=1e-6)
    one_by_one = pipeline.decoded(draws[1], "np", batch_size=1)
    np.testing.assert_allclose(one_by_one, expected, atol=1e-5)
    previews = sorted((straight / "lrlab" / "samples").glob("*.npy"))
    assert {np.load(path).shape for path in previews} <= {(2, 8, 8, 1)}
    assert main(["check", str(straight)]) == 0


def test_it_is_measured_against_the_images_that_were_encoded(straight):
    results = runs.read_record(straight)["train"]["results"]
    assert results["frechet_num_samples"] == 20
    # Training images in the place of samples are digits; what a random autoencoder makes of digits is not.
    assert results["frechet_distance_of_decoded_latents"] > 2 * results["frechet_distance_of_training_images"]
    assert results["frechet_distance"] > 0


def test_the_card_the_record_and_the_plan_name_the_autoencoder_and_the_model_fits(straight, place):
    record = read_latents_record(place / "digits")
    card = (straight / "README.md").read_text()
    named = f"AutoencoderKL {place / 'vae'}, weights {record.weights_sha256[:12]}"
    assert named in card
    assert "latent-diffusion" in card
    assert runs.read_record(straight)["train"]["autoencoder"]["weights_sha256"] == record.weights_sha256
    options = resolved(place)
    plan = make_plan(options, load_data(options), given_model_config(options))
    assert named in describe_plan(plan)
    model = model_class_of(plan.config)(**plan.model_config)
    assert isinstance(model, UNet2DModel)
    assert (model.config.sample_size, model.config.in_channels, model.config.out_channels) == (4, 2, 2)


def test_an_autoencoder_of_the_hub_is_saved_as_its_commit(place, hub, tmp_path):
    files = {path.name: path.read_bytes() for path in (place / "vae").iterdir()}
    hub.put("user/pipeline", {f"vae/{name}": content for name, content in files.items()})
    commit = hub.model("user/pipeline").head
    how = {"env": {**hub.env, "ACCELERATE_CONFIG_FILE": os.devnull}, "cwd": tmp_path}
    options = ("--vae", "user/pipeline", "--subfolder", "vae", "--batch_size", "200")
    status, _, stderr = started.run(
        "-m", "diffusers_lrlab", "data", "encode", "digits", tmp_path / "digits", *options, **how
    )
    assert status == 0, stderr
    assert read_latents_record(tmp_path / "digits").autoencoder["revision"] == commit
    shutil.copyfile(place / "unet.json", tmp_path / "unet.json")
    train(tmp_path, tmp_path / "run", **how)
    index = json.loads((tmp_path / "run" / "model_index.json").read_text())
    assert index["vae"] == [None, None]
    assert index["vae_source"]["revision"] == commit
    assert not (tmp_path / "run" / "vae").exists()
    assert f"commit {commit[:12]}" in (tmp_path / "run" / "README.md").read_text()
    code = f"""
import diffusers_lrlab
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained({str(tmp_path / "run")!r})
print(pipeline(batch_size=2, num_inference_steps=1, output_type="np").images.shape, type(pipeline.vae).__name__)
"""
    status, stdout, stderr = started.run("-c", code, **how)
    assert (status, stdout.strip()) == (0, "(2, 8, 8, 1) AutoencoderKL"), stderr


def test_labels_are_those_of_pixels_and_dropped_for_the_same_images(place):
    told = {"label_column": "label", "label_dropout": 0.3}
    latents = resolved(place, **told)
    pixels = config(dataset_name="digits", train_batch_size=8, num_validation_images=16, **told)
    seen = []
    for options in (latents, pixels):
        data, layout = load_data(options), options.layout(1)
        assert (data.classes.names, sum(data.classes.counts)) == (tuple(map(str, range(10))), 1797)
        batches = iterate_batches(data, layout, 0, range(6))
        seen.append(
            (data.classes, data.held_out.conditions["class_labels"], [batch.conditions["class_labels"] for batch in batches])
        )
    (classes, held_out, labels), (classes_of_pixels, held_out_of_pixels, labels_of_pixels) = seen
    assert classes == classes_of_pixels
    assert torch.equal(held_out, held_out_of_pixels)
    assert torch.equal(torch.cat(labels), torch.cat(labels_of_pixels))
    assert 0 < (torch.cat(labels) == 10).sum() < 48


REFUSED = [
    ({"random_flip": True}, "--random_flip True has no effect without a data set of images"),
    ({"resolution": 16}, r"--resolution 16: must be 8 for the latents .*Hint: .*lrlab data encode"),
    ({"data_kind": "images"}, "--data_kind 'images': must be latents, or left out"),
    ({"streaming": True, "max_train_steps": 3}, "--streaming True: must be left out for the latents"),
    ({"label_column": "digit"}, "--label_column 'digit': must be 'label' for the latents .*, got 'digit'"),
    ({"train_data_dir": None, "dataset_name": "digits", "data_kind": "latents"}, "data that are not a folder of latents"),
]


@cases(("options", "told"), REFUSED)
def test_options_that_latents_do_not_have_are_refused(place, options, told):
    with pytest.raises(LabError, match=told):
        resolved(place, **options)


def test_labels_that_were_not_encoded_are_refused_before_data_are_read(place, tmp_path):
    record = read_latents_record(place / "digits")
    (tmp_path / "digits").mkdir()
    dataclasses.replace(record, label_column=None).write(tmp_path / "digits")
    told = r"--label_column 'label': must be left out for the latents .*Hint: these images were encoded without it"
    with pytest.raises(LabError, match=told):
        resolved(tmp_path, label_column="label")


def test_a_model_that_does_not_fit_is_refused_before_data_are_read(place, tmp_path):
    for change, message in (
        ({"in_channels": 1}, r"in_channels=1 of the model .*must be 2, as the latents have"),
        ({"sample_size": 8}, r"sample_size=8 of the model .*must be 4"),
        ({"num_class_embeds": 10}, r"num_class_embeds=10 of the model .*must be None, as the latents have.*--label_column"),
    ):
        (tmp_path / "unet.json").write_text(json.dumps({**TINY_UNET, **change}))
        with pytest.raises(LabError, match=message):
            given_model_config(resolved(place, model_config_name_or_path=str(tmp_path / "unet.json")))


def test_damaged_and_missing_latents_are_refused(place, tmp_path):
    options = resolved(shutil.copytree(place, tmp_path / "place"))
    rows = tmp_path / "place" / "digits" / ROWS_FILE
    content = rows.read_bytes()
    rows.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(LabError, match=r"latents.arrow' is damaged.*encode again with lrlab data encode"):
        load_data(options)


def test_another_autoencoder_than_that_of_the_latents_is_refused(place, tmp_path):
    moved = shutil.copytree(place, tmp_path / "place")
    record = read_latents_record(moved / "digits")
    for name, change in {"seed": {"seed": 1}, "scale": {"scaling_factor": 1.5}, "gone": None}.items():
        if change is not None:
            save_vae(tmp_path / name, **change)
        other = dataclasses.replace(record, autoencoder={**record.autoencoder, "name_or_path": str(tmp_path / name)})
        other.write(moved / "digits")
        told = "one that can be loaded.*Hint: .*if it was moved" if change is None else "must be the one that encoded"
        with pytest.raises(LabError, match=f"(?s){told}"):
            load_data(resolved(moved))


def test_a_run_does_not_go_on_with_latents_of_another_autoencoder(place, tmp_path):
    moved = shutil.copytree(place, tmp_path / "place")
    train(moved, tmp_path / "run")
    shutil.rmtree(moved / "digits")
    encode(moved / "digits", save_vae(moved / "other", seed=1), flip=True)
    error = train(moved, tmp_path / "run", "--resume_from_checkpoint=checkpoint-4", expect=2)
    assert "autoencoder: {'class_name': 'AutoencoderKL'" in error
