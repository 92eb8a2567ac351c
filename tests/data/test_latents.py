"""`lrlab data encode`: what it writes, and what it refuses; and the latents that training draws."""

import dataclasses
import json
import re

import datasets
import numpy as np
import pytest
import runs
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from helpers import image_folder
from latents import encode, record_of, save_vae

from diffusers_lrlab import LabError
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.data.image_sets import load_image_dataset
from diffusers_lrlab.data.latent_data import LatentTransform
from diffusers_lrlab.data.latents import LATENTS_FILE, ROWS_FILE, read_latents_record


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


def test_a_finished_folder_has_a_record_is_left_alone_and_damage_is_reported(few, vae, tmp_path, capsys):
    words = (few, tmp_path / "out", "--vae", vae, "--resolution", 4, "--cache_dir", tmp_path / "cache")
    assert encode_by_command(*words) == 0
    assert f"lrlab train --train_data_dir {tmp_path / 'out'}" in capsys.readouterr().out
    record = read_latents_record(tmp_path / "out")
    source = {"class_name": "AutoencoderKL", "name_or_path": str(vae), "subfolder": None, "revision": None}
    assert (record.autoencoder, record.scaling_factor, record.shift_factor) == (source, 0.9, 0.1)
    assert (record.shape, record.resolution, record.image_channels) == ((2, 2, 2), 4, 1)
    assert (record.dataset, record.num_images) == (str(few), 20)
    assert encode_by_command(*words) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "out")]) == 0
    assert "a set of latents" in capsys.readouterr().out
    assert main(["push", str(tmp_path / "out"), "--repo_id", "user/latents"]) == 2
    assert "is a set of latents, which is not uploaded" in capsys.readouterr().err
    for file in (ROWS_FILE, LATENTS_FILE):
        path = tmp_path / "out" / file
        good = path.read_bytes()
        path.write_bytes(good.replace(b"4", b"5"))
        assert main(["check", str(tmp_path / "out")]) == 1
        assert f"{file}' is damaged (its SHA-256 has changed)" in capsys.readouterr().out
        path.write_bytes(good)
    data = json.loads(good)
    (tmp_path / "out" / LATENTS_FILE).write_text(json.dumps({"format": 2, **data}))
    with pytest.raises(LabError, match=r"is damaged, or of another version\. Hint: remove the folder and encode again"):
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
    assert record.shape == (4, 4, 4)
    assert {*all_of(tmp_path / "out")} == {"mean"}


REFUSED = [  # words of the command, beside a VAE unless one is given; what the error says
    (["dino"], "the data set 'dino': must be a data set of images"),
    (["{encoded}"], "the data set .*: must be a data set of images"),
    (["digits", "--vae", "./nowhere"], "--vae './nowhere': must be a Hub id, or a folder with a config.json"),
    (["digits", "--vae", "{unet}"], "--vae .*: must be an autoencoder of diffusers .*, got UNet2DModel"),
    (["digits", "--revision", "main"], "--revision 'main': must be left out for a folder"),
    (["digits", "--vae", "{normalised}"], "without latents_mean, got AutoencoderKL with in_channels=1 and latents_mean"),
    (["digits", "--resolution", "9"], "--resolution 9: must be a size that the autoencoder encodes and decodes"),
]


@pytest.mark.slow
def test_what_cannot_be_encoded_is_refused_before_it_begins(vae, encoded, tmp_path, capsys):
    places = {"encoded": encoded, "unet": tmp_path / "unet", "normalised": tmp_path / "normalised"}
    places["unet"].mkdir()
    (places["unet"] / "config.json").write_text(json.dumps(runs.TINY_UNET))
    save_vae(places["normalised"], latents_mean=(0.0, 0.0), latents_std=(1.0, 1.0))
    for words, message in REFUSED:
        name, *options = (word.format(**places) for word in words)
        options += ["--cache_dir", tmp_path / "cache", *([] if "--vae" in words else ["--vae", vae])]
        assert encode_by_command(name, tmp_path / "out", *options) == 2, words
        assert re.search(message, capsys.readouterr().err), message
        assert not (tmp_path / "out").exists(), words


def test_unreadable_images_are_named(vae, tmp_path, capsys):
    image_folder(tmp_path / "images", 3)
    (tmp_path / "images" / "odd" / "001.png").write_bytes(b"no image")
    assert encode_by_command(tmp_path / "images", tmp_path / "out", "--vae", vae, "--resolution", 4) == 2
    assert re.search(r"The image '\S+001.png' cannot be read: .* Replace or remove it\.$", capsys.readouterr().err.strip())
    assert not (tmp_path / "out").exists()


@pytest.fixture
def transform():
    record = dataclasses.replace(record_of(), shape=(2, 4, 4), scaling_factor=0.9, shift_factor=0.1, flip=True)
    return LatentTransform(record, seed=3)


def test_draws_have_the_mean_and_the_variance(transform):
    stored = torch.tensor([1.0, 0.5, -1.0, 0.25]).view(4, 1, 1, 1).expand(4, 2, 4, 4)
    drawn = transform.augment(stored.expand(2000, -1, -1, -1, -1), range(2000))
    unscaled = drawn / 0.9 + 0.1
    flipped = unscaled.mean(dim=(1, 2, 3)) < 0
    assert 0.45 < flipped.float().mean() < 0.55
    for mask, mean, std in ((~flipped, 1.0, 0.5), (flipped, -1.0, 0.25)):
        assert float(unscaled[mask].mean()) == pytest.approx(mean, abs=0.02)
        assert float(unscaled[mask].std()) == pytest.approx(std, rel=0.02)
    assert torch.equal(transform.fixed(stored), (stored[0] - 0.1) * 0.9)


def test_a_draw_depends_on_seed_and_number_alone(transform):
    stored = torch.rand(4, 2, 4, 4)
    together = transform.augment(torch.stack([stored] * 2), [5, 6])
    assert torch.equal(together[1:], transform.augment(stored[None], [6]))
    assert not torch.equal(*together)
