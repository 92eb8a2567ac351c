"""Made image sets as folders that load, stream and train elsewhere."""

import numpy as np
import pytest
from datasets import ClassLabel, load_dataset
from huggingface_hub import DatasetCard
from pyarrow.parquet import ParquetFile

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.image_sets import load_image_dataset
from diffusers_lrlab.hub.dataset_folder import export_dataset

pytestmark = pytest.mark.pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "shapes"
    assert main(["data", "export", "shapes", str(folder), "--n", "50", "--n_test", "5", "--resolution", "32"]) in (0, None)
    return folder


def test_it_loads_without_the_package(folder, tmp_path):
    loaded = load_dataset(str(folder), cache_dir=str(tmp_path))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 50, "test": 5}
    assert isinstance(loaded["train"].features["label"], ClassLabel)
    for split in loaded:
        made = load_image_dataset("shapes", n=len(loaded[split]), split=split, resolution=32)
        assert loaded[split].features == made.features
        for first, second in zip(loaded[split], made, strict=True):
            assert np.array_equal(first.pop("image"), second.pop("image"))
            assert first == second


def test_its_card_and_picture(folder):
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert [file["split"] for file in card.data.configs[0]["data_files"]] == ["train", "test"]
    rows = ("| `rotation` | float64 |", "| `label` | ClassLabel |", "circle, triangle, square, star")
    assert all(text in card.text for text in (*rows, "--n 50 --n_test 5 --seed 42 --resolution 32"))
    assert (folder / "images.png").stat().st_size > 1000
    assert ParquetFile(folder / "data" / "train-00000-of-00001.parquet").num_row_groups > 8


def test_what_is_not_exported(tmp_path, capsys):
    with pytest.raises(LabError, match=r"'digits' cannot be exported.*UCI.*'shapes'"):
        export_dataset("digits", tmp_path / "digits")
    assert not (tmp_path / "digits").exists()
    assert main(["data", "export", "dino", str(tmp_path / "dino"), "--resolution", "32"]) == 2
    assert main(["data", "export", "shapes", str(tmp_path / "dino"), "--resolution", "8"]) == 2
    assert "--resolution 8: must be" in capsys.readouterr().err
    assert not (tmp_path / "dino").exists()
