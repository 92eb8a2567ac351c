"""`lrlab data encode`: what it writes, and what it refuses; and the latents that training draws."""

import dataclasses
import json
import os
import re
import signal

import datasets
import numpy as np
import pytest
import runs
import started
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from helpers import image_folder
from latents import encode, record_of, save_vae

from diffusers_lrlab import LabError
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.manifest import with_sum
from diffusers_lrlab.data.image_sets import load_image_dataset
from diffusers_lrlab.data.latent_data import LatentTransform
from diffusers_lrlab.data.latents import LATENTS_FILE, ROWS_FILE, read_latents_record

NUM_DIGITS = 1797


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """20 grey images of 4x4 pixels, in two classes."""
    return image_folder(tmp_path_factory.mktemp("few") / "images")


@pytest.fixture(scope="module")
def encoded(vae, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded") / "digits"
    encode(folder, vae, flip=True, batch_size=100)
    return folder


def all_of(folder):
    """The parts of all latents by name, and their labels."""
    record, rows = read_latents_record(folder), datasets.Dataset.from_file(str(folder / ROWS_FILE))
    parts = torch.stack([LatentTransform(record, 0).read(cell) for cell in rows["latent"]]).unbind(1)
    found = dict(zip(("mean", "std", "mean_flipped", "std_flipped"), parts, strict=False))
    return found | {name: rows[name][:] for name in rows.column_names if name != "latent"}


def encode_by_command(*words):
    return main(["data", "encode", *map(str, words)])


@pytest.mark.slow
def test_latents_are_those_of_diffusers(encoded, vae):
    model = AutoencoderKL.from_pretrained(vae).eval()
    rows = load_image_dataset("digits")
    images = torch.from_numpy(np.stack([np.array(image) for image in rows["image"]]))[:, None]
    images = images.float() / 255 * 2 - 1
    found = all_of(encoded)
    with torch.no_grad():
        for start in (0, 100, 1700):
            part = images[start : start + 100]
            for end, those in (("", part), ("_flipped", part.flip(-1))):
                expected = model.encode(those).latent_dist
                rows_there = slice(start, start + len(part))
                assert torch.equal(found[f"mean{end}"][rows_there], expected.mean)
                assert torch.equal(found[f"std{end}"][rows_there], expected.std)
    assert found["label"] == rows["label"][:]
    assert not torch.allclose(found["mean"], found["mean_flipped"])


def test_the_record_says_what_encoded_what(encoded, vae):
    record = read_latents_record(encoded)
    source = {"class_name": "AutoencoderKL", "name_or_path": str(vae), "subfolder": None, "revision": None}
    assert record.autoencoder == source
    assert (record.scaling_factor, record.shift_factor) == (0.9, 0.1)
    assert (record.shape, record.resolution, record.image_channels) == ((2, 4, 4), 8, 1)
    assert (record.image_set, record.num_images) == ("digits", NUM_DIGITS)
    found = all_of(encoded)
    scaled = (found["mean"].double() - 0.1) * 0.9
    square = scaled.square() + (found["std"].double() * 0.9).square()
    expected = float(scaled.mean()), float((square.mean() - scaled.mean() ** 2).sqrt())
    assert (record.mean, record.std) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_killed_encode_leaves_no_folder_and_is_repeated(encoded, vae, tmp_path):
    folder = tmp_path / "digits"
    words = ("--vae", vae, "--flip", "--label_column", "label", "--batch_size", "100")
    command = ("-m", "diffusers_lrlab", "data", "encode", "digits", folder, *words)
    process = started.Started(*command, env=runs.environment())
    runs.wait_for(lambda: len([*tmp_path.rglob("*latents.arrow*")]), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not folder.exists()
    status, _, stderr = started.run(*command, env=runs.environment())
    assert status == 0, stderr
    for path in encoded.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_damage_is_reported(few, vae, tmp_path, capsys):
    words = (few, tmp_path / "out", "--vae", vae, "--resolution", 4, "--cache_dir", tmp_path / "cache")
    assert encode_by_command(*words) == 0
    assert f"lrlab train --train_data_dir {tmp_path / 'out'}" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "out")]) == 0
    assert "set of latents, finished, 20 images" in capsys.readouterr().out
    rows = tmp_path / "out" / ROWS_FILE
    content = bytearray(good := rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    assert main(["check", str(tmp_path / "out")]) == 1
    assert "its SHA-256 has changed" in capsys.readouterr().out
    rows.write_bytes(good)
    assert main(["push", str(tmp_path / "out"), "--repo_id", "user/latents"]) == 2
    assert "holds latents, which are not uploaded" in capsys.readouterr().err
    text = (tmp_path / "out" / LATENTS_FILE).read_text()
    (tmp_path / "out" / LATENTS_FILE).write_text(text.replace('"flip": false', '"flip": true'))
    assert main(["check", str(tmp_path / "out")]) == 1
    data = json.loads(text) | {"format": 2}
    (tmp_path / "out" / LATENTS_FILE).write_text(json.dumps(with_sum({k: data[k] for k in data if k != "sha256"})))
    with pytest.raises(
        LabError, match=r"it has the format 2, this version reads 3\. Hint: remove the folder and encode again"
    ):
        read_latents_record(tmp_path / "out")


def test_a_deterministic_autoencoder_has_means_alone(few, tmp_path):
    torch.manual_seed(0)
    sizes = {"encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16), "latent_channels": 4}
    blocks = {"encoder_block_types": "ResBlock", "decoder_block_types": "ResBlock", "attention_head_dim": 4}
    layers = {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1)}
    multiscale = {"encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}
    vae = AutoencoderDC(in_channels=3, **sizes, **blocks, **layers, **multiscale, scaling_factor=0.5)
    vae.save_pretrained(tmp_path / "vae")
    record = encode(tmp_path / "out", tmp_path / "vae", few, None, resolution=8, cache_dir=str(tmp_path / "cache"))
    assert (record.is_deterministic, record.shape) == (True, (4, 4, 4))
    assert {*all_of(tmp_path / "out")} == {"mean"}


REFUSED = {
    "toy": (["dino"], "the data set 'dino': must be a data set of images"),
    "missing folder": (["./nowhere"], "Cannot load the dataset './nowhere'"),
    "latents": (["LATENTS"], "the data set .*: must be a data set of images"),
    "vae path": (["digits", "--vae", "./nowhere"], "--vae './nowhere': must be a Hub id, or a folder with a config.json"),
    "no vae": (["digits", "--vae", "UNET"], "--vae .*: must be an autoencoder of diffusers, got a UNet2DModel"),
    "none": (["digits"], "--vae None: must be given to lrlab data encode"),
    "revision": (["digits", "--revision", "main"], "--revision 'main': must be left out for a folder"),
    "normalised": (["digits", "--vae", "NORMALISED"], "must be an autoencoder with one scaling_factor"),
    "channels": (["digits", "--vae", "FOUR"], "must be an autoencoder of grey or RGB images, got 4 channels"),
    "size": (["digits", "--resolution", "9"], "--resolution 9: must be a size that the autoencoder reproduces"),
    "label": (["digits", "--label_column", "kind"], "--label_column 'kind': must be a column of whole numbers"),
    "batch": (["digits", "--batch_size", "0"], "--batch_size 0: must be a whole number"),
    "split": (
        ["digits", "--dataset_split", "test"],
        "--dataset_split .test. has no effect without a data set that is",
    ),
    "column": (["FEW", "--image_column", "picture"], "--image_column 'picture' is not a column of images"),
    "export": (["digits", "--n", "10"], "--n 10: must be left out of lrlab data encode"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_encoded_is_refused_before_it_begins(name, vae, few, encoded, tmp_path, capsys):
    words, message = REFUSED[name]
    if "NORMALISED" in words:
        save_vae(tmp_path / "other", latents_mean=(0.0, 0.0), latents_std=(1.0, 1.0))
    if "FOUR" in words:
        save_vae(tmp_path / "other", in_channels=4, out_channels=4)
    if "UNET" in words:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text(json.dumps(runs.TINY_UNET))
    known = {"LATENTS": encoded, "FEW": few, "NORMALISED": tmp_path / "other"}
    known |= {"FOUR": tmp_path / "other", "UNET": tmp_path / "other"}
    words = [str(known.get(word, word)) for word in words]
    words += [] if "--vae" in words or name == "none" else ["--vae", str(vae)]
    assert encode_by_command(words[0], tmp_path / "out", *words[1:], "--cache_dir", tmp_path / "cache") == 2
    assert re.search(message, capsys.readouterr().err), message
    assert not (tmp_path / "out").exists()


def test_a_folder_of_latents_or_other_files_is_left_alone(encoded, vae, tmp_path, capsys):
    before = (encoded / LATENTS_FILE).read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("kept")
    for folder in (encoded, tmp_path / "mine"):
        assert encode_by_command("digits", folder, "--vae", vae) == 2
        assert "is not an empty folder" in capsys.readouterr().err
    assert (encoded / LATENTS_FILE).read_bytes() == before


def test_unreadable_images_and_negative_labels_are_named(vae, tmp_path, capsys):
    cells = [{"bytes": None, "path": str(image)} for image in sorted(image_folder(tmp_path / "images", 3).rglob("*.png"))]
    broken = [*cells[:2], {"bytes": b"no image", "path": "broken.png"}]
    for name, images, labels in (("broken", broken, [0, 1, 2]), ("negative", cells, [0, -1, 1])):
        rows = datasets.Dataset.from_dict(
            {"image": images, "label": labels},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
        )
        (tmp_path / name).mkdir()
        rows.to_parquet(tmp_path / name / "train.parquet")
    options = ("--vae", vae, "--resolution", 4, "--label_column", "label", "--cache_dir", tmp_path / "cache")
    assert encode_by_command(tmp_path / "broken", tmp_path / "out", *options) == 2
    assert "The image 'broken.png' cannot be read" in capsys.readouterr().err
    assert encode_by_command(tmp_path / "negative", tmp_path / "other", *options) == 2
    assert "label=-1 of row 1: must be a label, a whole number from 0 on, got -1" in capsys.readouterr().err


# --- what training draws -----------------------------------------------------------------------------------------------


@pytest.fixture
def transform():
    record = dataclasses.replace(record_of(), shape=(2, 4, 4), scaling_factor=0.9, shift_factor=0.1, flip=True)
    return LatentTransform(record, seed=3)


def test_draws_have_the_mean_and_the_variance(transform):
    stored = torch.tensor([1.0, 0.5, -1.0, 0.25]).view(4, 1, 1, 1).expand(4, 2, 4, 4)
    drawn = torch.stack([transform.augment(stored, number) for number in range(2000)])
    unscaled = drawn / 0.9 + 0.1
    flipped = unscaled.mean(dim=(1, 2, 3)) < 0
    assert 0.45 < flipped.float().mean() < 0.55
    for mask, mean, std in ((~flipped, 1.0, 0.5), (flipped, -1.0, 0.25)):
        assert float(unscaled[mask].mean()) == pytest.approx(mean, abs=0.02)
        assert float(unscaled[mask].std()) == pytest.approx(std, rel=0.02)
    assert torch.equal(transform.fixed(stored), (stored[0] - 0.1) * 0.9)


def test_a_draw_depends_on_seed_and_number_alone(transform):
    stored = torch.rand(4, 2, 4, 4)
    together = transform.augment_all(torch.stack([stored] * 3), [5, 6, 5])
    assert torch.equal(together[0], together[2])
    assert torch.equal(together[1], transform.augment(stored, 6))
    assert not torch.equal(together[0], together[1])
