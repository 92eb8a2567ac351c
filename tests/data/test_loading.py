"""From a name or a folder to images: everything that can be read, how it is split, and what is said when it cannot be."""

import re

import datasets
import numpy as np
import pytest
import torch
from helpers import image_folder, joined, levels, load, numbered_image, png
from PIL import Image
from sklearn.datasets import load_digits
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.batches import iterate_batches
from diffusers_lrlab.data.image_sets import load_image_dataset
from diffusers_lrlab.data.images import decode
from diffusers_lrlab.data.options import BatchLayout, DataConfig
from diffusers_lrlab.data.sources import load_errors_explained

LAZY = {"in_memory_limit_mb": 0}


def all_levels(data, **options):
    """The levels of the training images of one epoch, by reading batches of one."""
    batches = iterate_batches(data, BatchLayout(1), 0, range(data.num_images), **options)
    return sorted(level for images in batches for level in levels(images))


def write_parquet(folder, **columns):
    """A folder with one parquet file, as the Hub has them."""
    folder.mkdir()
    rows = {"image": [numbered_image(number) for number in range(20)], **columns}
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train-00000-of-00001.parquet")
    return folder


def save_to_disk(folder):
    rows = {"picture": [numbered_image(number) for number in range(20)], "caption": ["text"] * 20}
    datasets.Dataset.from_dict(rows).save_to_disk(folder)
    return folder


def test_digits_are_those_of_scikit_learn_in_two_parts_without_loss():
    dataset, original, digits = load_image_dataset("digits"), load_digits(), load()
    pixels = np.rint(original.images * (255 / 16)).astype(int)
    assert dataset["label"][:] == original.target.tolist()
    assert np.array_equal(np.stack([np.asarray(image) for image in dataset["image"]]), pixels)
    assert (len(digits.in_memory), len(digits.held_out), digits.fingerprint) == (1541, 256, "digits")
    everything = joined([digits.in_memory, digits.held_out])[:, 0]
    restored = np.rint((everything.numpy() + 1) * 127.5).astype(int)
    np.testing.assert_allclose(everything, restored / 127.5 - 1, atol=1e-6)
    assert sorted(restored.reshape(-1, 64).tolist()) == sorted(pixels.reshape(-1, 64).tolist())


@cases(("write", "column"), [(image_folder, "image"), (write_parquet, "image"), (save_to_disk, "picture")])
@cases("limit", [1024, 0])
def test_folders_that_are_read(tmp_path, write, column, limit):
    data = load(write(tmp_path / "data"), in_memory_limit_mb=limit)
    assert (data.column, data.num_images, data.in_memory is None) == (column, 20, limit == 0)
    assert all_levels(data) == list(range(20))


@cases("limit", [1024, 0])
@cases(("asked", "held_out"), [(0, 0), (3, 3), (256, 4)])
def test_at_most_a_fifth_is_held_out_and_never_trained_on(tmp_path, asked, held_out, limit):
    data = load(image_folder(tmp_path / "images"), num_validation_images=asked, in_memory_limit_mb=limit)
    assert (len(data.held_out), data.num_images) == (held_out, 20 - held_out)
    assert sorted(all_levels(data) + levels(data.held_out)) == list(range(20))


def test_the_fingerprint_follows_the_data(tmp_path):
    first = load(image_folder(tmp_path / "a" / "images")).fingerprint
    assert load(tmp_path / "a" / "images").fingerprint == first
    assert load(image_folder(tmp_path / "b" / "images", count=21)).fingerprint != first


@pytest.mark.parametrize("limit", [1024, 0])
def test_a_folder_of_16_bit_images_keeps_its_precision(tmp_path, limit):
    folder = tmp_path / "images"
    folder.mkdir()
    values = np.arange(16, dtype=np.uint16).reshape(4, 4) + 30_000
    Image.fromarray(values).save(folder / "deep.png")
    (images,) = iterate_batches(load(folder, in_memory_limit_mb=limit), BatchLayout(1), 0, range(1))
    np.testing.assert_array_equal(np.rint((images.data[0, 0].double().numpy() + 1) / 2 * 65535), values)
    rounded = load(folder, in_memory_limit_mb=limit, preserve_input_precision=False)
    (images,) = iterate_batches(rounded, BatchLayout(1), 0, range(1))
    assert images.data.unique().numel() == 1


def test_oblong_images_stay_in_memory_whole_for_random_crops(tmp_path):
    folder = image_folder(tmp_path / "images", size=(6, 4))
    assert load(folder).in_memory.data.shape == (20, 1, 4, 6)
    assert load(folder, center_crop=True).in_memory.data.shape == (20, 1, 4, 4)
    numbered_image(20, size=(7, 4)).save(folder / "even" / "020.png")
    assert load(folder).in_memory is None
    assert load(folder, center_crop=True).in_memory.data.shape == (21, 1, 4, 4)


def test_images_as_bytes_are_made_images_by_the_call_in_the_error(tmp_path):
    dataset = datasets.Dataset.from_dict({"id": [0], "pixels": [png(7)]})
    dataset.to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(LabError, match=r"no column of images\. Columns: id \(int64\), pixels \(binary\)") as told:
        load(tmp_path / "data")
    call = re.search(r"dataset(\.cast_column\(.*?\)\))", str(told.value))[1].replace("NAME", "pixels")
    eval(f"dataset{call}").save_to_disk(tmp_path / "images")
    assert all_levels(load(tmp_path / "images")) == [7]


def test_two_columns_of_images_need_a_choice(tmp_path):
    masks = [numbered_image(100 + number) for number in range(20)]
    folder = write_parquet(tmp_path / "parquet", mask=masks, label=[0] * 20)
    with pytest.raises(LabError, match=r"several columns of images: image, mask\. Choose one with --image_column"):
        load(folder)
    assert all_levels(load(folder, image_column="mask")) == list(range(100, 120))
    for wrong in ("label", "picture"):
        told = f"--image_column '{wrong}' is not a column of images. Columns: image .*, mask .*, label .int64"
        with pytest.raises(LabError, match=told):
            load(folder, image_column=wrong)


def test_a_misspelt_folder_that_was_sought_on_the_hub_gets_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    wanted = r"Couldn't reach 'fotos' on the Hub. There is no folder of this name here, either. Did you mean 'photos'\?"
    with pytest.raises(LabError, match=wanted), load_errors_explained(DataConfig(dataset_name="fotos")):
        raise ConnectionError("Couldn't reach 'fotos' on the Hub")


CORRUPT = {"even/004.png", "odd/007.png"}
GOOD = [number for number in range(20) if number not in (4, 7)]


@pytest.fixture
def damaged(tmp_path):
    folder = image_folder(tmp_path / "images")
    for name in CORRUPT:
        (folder / name).write_bytes((folder / name).read_bytes()[:40])
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named_when_it_is_met(damaged, workers):
    expected = r"^The image '\S*0(04|07)\.png' cannot be read: .*--skip_corrupt_images\.$"
    with pytest.raises(LabError, match=expected):
        load(damaged)
    data = load(damaged, **LAZY)
    with pytest.raises(LabError, match=expected):
        all_levels(data, num_workers=workers)


def assert_reported_once(data, names=CORRUPT):
    assert len(data.skipped) == len(names)
    assert all(sum(name in problem for problem in data.skipped) == 1 for name in names)


def test_corrupt_images_are_left_out_of_memory_and_of_samples(damaged):
    data = load(damaged, skip_corrupt_images=True)
    assert_reported_once(data)
    assert all_levels(data) == GOOD
    lazy = load(damaged, skip_corrupt_images=True, **LAZY)
    for _ in range(2):
        assert sorted(levels(lazy.random_sample(20, 20))) == sorted(levels(lazy.all_in_memory())) == GOOD
        assert_reported_once(lazy)


@cases(("options", "workers"), [(LAZY, 0), (LAZY, 2), ({"streaming": True, "max_train_steps": 6}, 0)])
def test_corrupt_images_are_replaced_by_the_next_and_reported_once(damaged, options, workers):
    data = load(damaged, skip_corrupt_images=True, **options)
    batches = list(iterate_batches(data, BatchLayout(10), 0, range(6), workers))
    assert_reported_once(data)
    for epoch in range(3):
        seen = sorted(levels(joined(batches[2 * epoch : 2 * epoch + 2])))
        assert ({*seen}, len(seen)) == ({*GOOD}, 20)
        if options is LAZY:  # the next file takes the place of a corrupt one: of 4 that is 6, since both are even
            assert seen == sorted([*GOOD, 6, 9])


def test_nothing_but_corrupt_images_is_an_error(tmp_path):
    for path in image_folder(tmp_path / "images", count=3).rglob("*.png"):
        path.write_bytes(b"nothing")
    for limit, told in ((1024, "no images to train on"), (0, "cannot be read: PIL does not know its format")):
        with pytest.raises(LabError, match=told):
            all_levels(load(tmp_path / "images", skip_corrupt_images=True, in_memory_limit_mb=limit))


def test_a_corrupt_image_among_the_held_out_ones_is_left_out(tmp_path):
    folder = image_folder(tmp_path / "images")
    held_out = levels(load(folder, num_validation_images=4).held_out)
    name = f"{held_out[0]:03}.png"
    next(folder.rglob(name)).write_bytes(b"")
    with pytest.raises(LabError, match=name):
        load(folder, num_validation_images=4)
    data = load(folder, num_validation_images=4, skip_corrupt_images=True)
    assert levels(data.held_out) == held_out[1:]
    assert_reported_once(data, [name])


@cases("options", [LAZY, {"streaming": True, "max_train_steps": 1}], ids=["lazy", "stream"])
def test_a_sample_decodes_no_other_images(tmp_path, monkeypatch, options):
    folder = image_folder(tmp_path / "images")
    data, whole = load(folder, **options), load(folder)
    opened = []
    monkeypatch.setattr("diffusers_lrlab.data.images.decode", lambda *args: opened.append(1) or decode(*args))
    sample = levels(data.random_sample(6, 100))
    assert len(opened) == len(set(sample)) == 6
    if "streaming" not in options:
        assert sample == levels(whole.random_sample(6, 100)) == levels(whole.random_sample(20, 100))[:6]
        assert sorted(levels(data.random_sample(6, 5))) == [0, 2, 4, 6, 8]  # the first files, those of the folder "even"


@cases("option", ["dataset_config_name", "dataset_split"])
def test_a_saved_set_has_no_configurations_or_splits(tmp_path, option):
    with pytest.raises(LabError, match="which stores no configurations or splits"):
        load(save_to_disk(tmp_path / "images"), **{option: "test"})


@cases("write", [write_parquet, image_folder, save_to_disk])
def test_a_stream_of_a_folder_has_the_order_of_its_seed_and_holds_out_a_fifth_at_most(tmp_path, write):
    folder, options = write(tmp_path / "data"), {"streaming": True, "max_train_steps": 4, "num_validation_images": 256}
    first, again, other = (load(folder, seed=seed, **options) for seed in (0, 0, 1))
    assert (first.num_images, first.in_memory, len(first.held_out)) == (None, None, 4)
    orders = [levels(joined(iterate_batches(data, BatchLayout(4), 0, range(4)))) for data in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0] + levels(first.held_out)) == list(range(20))
    assert orders[0] != sorted(orders[0])
    assert torch.equal(first.held_out.data, other.held_out.data)
