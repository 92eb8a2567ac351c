"""Folders as users have them: which images are read, with which labels, and what is said about those that are not."""

import os
import re
import zipfile
from pathlib import Path

import datasets
import pytest
from helpers import levels, load, numbered_image, png
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.options import DataConfig
from diffusers_lrlab.data.sources import open_dataset

TEXT, JUNK = "a grey square", b"\0\1not an image\xff" * 9


def numbers(folder, count, ending=".png"):
    """Names of images."""
    return [f"{folder}{number:03}{ending}" for number in range(count)]


def write(folder, names, others=None, links=None, archives=None):
    """Images of other levels by name, files by content, links by target, and archives by the names of their images."""
    for level, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            numbered_image(level).save(file, "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else "png")
    for name, content in (others or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, target in (links or {}).items():
        (folder / name).symlink_to(target)
    for name, inside in (archives or {}).items():
        with zipfile.ZipFile(folder / name, "w") as archive:
            for level, each in enumerate(inside):
                archive.writestr(each, png(level))


def read(folder, split="train"):
    """Names of the rows relative to the folder, and their labels; a stream has the same."""
    found = []
    for streaming in (False, True):
        options = {"dataset_split": split, "streaming": streaming, "cache_dir": str(folder.parent / "cache")}
        rows = open_dataset(DataConfig(train_data_dir=str(folder), **options))
        rows = rows.cast_column("image", datasets.Image(decode=False))
        labels = getattr(rows.features.get("label"), "names", None)
        found.append([(os.path.relpath(row["image"]["path"], folder), labels and labels[row["label"]]) for row in rows])
    assert [label for _, label in found[0]] == [label for _, label in found[1]]
    return found[0]


# Name: arguments of `write`; rows; labels; the end of the warning, or None for none.
FOLDERS = {
    "some are named as splits": ([*numbers("", 9), "train.png", "my test 1.png"], {}, 11, None, None),
    "classes, one named train": (
        [*numbers("bus/", 4), *numbers("2020-test-shoot/", 4), *numbers("train/", 4)],
        {}, 12, {"bus", "2020-test-shoot", "train"}, None,
    ),
    "splits of classes": (
        [*numbers("train/x/", 2), *numbers("train/y/", 2), *numbers("valid/x/", 2)],
        {"others": {"README.md": TEXT}}, 4, {"x", "y"}, None,
    ),
    "splits, and photos beside": ([*numbers("train/", 4), *numbers("test/", 3), "cover.png"], {}, 8, None, None),
    "splits below another folder": (
        [*numbers("data/train/", 4), *numbers("data/test/", 3)],
        {}, 7, {"train", "test"}, r"The folders test, train in '.*/data' are trained on together\. .* give '.*/data'",
    ),
    "a linked folder, and loops": (
        [*numbers("a/", 3), *numbers("../elsewhere/", 4)],
        {"links": {"b": "../elsewhere", "again": "../elsewhere", "self": ".", "a/up": "..", "c": "a"}},
        7, {"a", "again"}, None,
    ),
    "a linked file, and one that is gone": (
        numbers("", 3), {"links": {"x.png": "000.png", "w.png": "w.png", "y.png": "gone.png", "z.png": "/dev/zero"}},
        4, None, r"3 of 7 images .* were not read: 3 such as 'w\.png' \(not a file, or a link that leads nowhere\)\.",
    ),
    "a name that is not UTF-8": (
        numbers("", 3), {"others": {os.fsdecode(b"\xe9t\xe9.png"): JUNK}},
        3, None, r"1 of 4 images .* 1 such as '\\udce9t\\udce9\.png' \(rename these in UTF-8\)\.",
    ),
    "photos of a phone and of a camera": (
        numbers("", 3, ".JPG"), {"others": dict.fromkeys([*numbers("trip/", 5, ".HEIC"), *numbers("", 2, ".NEF")], JUNK)},
        3, None, r"7 of 10 images .* 7 such as '000\.NEF' \(install a plug-in of PIL, such as pillow-heif, or convert",
    ),
    "metadata of a part": (
        numbers("", 24), {"others": {"metadata.jsonl": "".join(f'{{"file_name": "{name}"}}\n' for name in numbers("", 6))}},
        6, None, r"18 of 24 images .* 18 such as '006\.png' \(metadata\.jsonl does not name these\)\.",
    ),
    "metadata of all": (
        numbers("b/", 2), {"others": {"b/metadata.csv": "file_name,n\n001.png,1\n000.png,2\n"}}, 2, None, None,
    ),
    "captions and hidden files": (
        numbers("", 3),
        {"others": {**dict.fromkeys(numbers("", 3, ".txt"), TEXT), ".DS_Store": JUNK, "Thumbs.db": JUNK, "._000.png": JUNK,
                    "__MACOSX/000.png": JUNK, ".trash/001.png": JUNK, "notes.json": "[]"}},
        3, None, None,
    ),
    "archives": (
        [], {"archives": {"cats.zip": ["1.png", "2.png"], "dogs.zip": ["1.png", "__MACOSX/1.png"]}}, 3, None, None,
    ),
    "photos and an archive": (
        numbers("", 3), {"archives": {"more.zip": ["x/1.png", "y.png"]}},
        3, None, r"1 of 4 images .*'more\.zip' \(archives are read in a folder without other images: unpack it\)",
    ),
    "strange names": (
        ["a[1]/[x]*?.png", "a{2}/#%41.png", "å ü/~a,b;c.png", "$HOME/y::z.png", "__selected/1.png"],
        {}, 5, {"a[1]", "a{2}", "å ü", "$HOME", "__selected"}, None,
    ),
}  # fmt: skip


@cases("name", FOLDERS)
def test_images_of_a_folder_are_read_or_named(name, tmp_path, capsys):
    names, more, num_rows, labels, told = FOLDERS[name]
    folder = tmp_path / "photos"
    folder.mkdir()
    write(folder, names, **more)
    found = read(folder)
    assert len(found) == num_rows
    assert {label for _, label in found if label} == (labels or set())
    said = "".join(line for line in capsys.readouterr().err.splitlines() if "warning:" in line)
    assert said.count("warning:") == (told is not None)
    assert re.search(told or "^$", said), said


def test_rows_are_in_the_order_of_paths_or_of_metadata(tmp_path, capsys):
    write(tmp_path / "photos", [*numbers("b/", 2), *numbers("a b/", 2), *numbers("a/", 2), *numbers("B/", 1)])
    by_class = {"B": 1, "a b": 2, "a": 2, "b": 2}
    expected = [(f"{label}/{number:03}.png", label) for label, count in by_class.items() for number in range(count)]
    assert read(tmp_path / "photos") == expected
    write(tmp_path / "photos", [], {"metadata.csv": "n,file_name\n1.5,b/001.png\n2,a/000.png\n"})
    assert [name for name, _ in read(tmp_path / "photos")] == ["b/001.png", "a/000.png"]
    assert "5 of 7 images" in capsys.readouterr().err


def test_splits_of_a_folder_may_be_sliced_and_added(tmp_path):
    write(tmp_path / "photos", [*numbers("train/", 6), *numbers("valid/", 2), *numbers("val/", 1)])
    for split, names in {
        "validation": ["valid/000.png", "valid/001.png", "val/000.png"],
        "train[4:]+validation[:1]": ["train/004.png", "train/005.png", "valid/000.png"],
        "train[:50%]": numbers("train/", 3),
    }.items():
        assert [name for name, _ in read(tmp_path / "photos", split)] == names
    with pytest.raises(LabError, match=r'Unknown split "test"\. Should be one of \[\'train\', \'validation\'\]'):
        read(tmp_path / "photos", "test")


@cases(
    ("name", "content", "told"),
    [
        ("csv", "file_name;text\n000.png;x\n", r"no column file_name, .*'file_name;text'\. .* separated by commas"),
        ("csv", "file_name,text\n000.png,\xe9\n".encode("cp1252"), r"metadata\.csv' cannot be read \(.*utf-8.*with columns"),
        ("csv", "file_name,text\n", r"metadata\.csv' has no rows\. Hint: add a row for each image, or remove the file"),
    ],
)
def test_metadata_that_cannot_be_read_are_named_with_the_remedy(tmp_path, name, content, told):
    write(tmp_path / "photos", numbers("", 2), {f"metadata.{name}": content})
    with pytest.raises(LabError, match=told):
        read(tmp_path / "photos")


def test_a_folder_without_images_is_said_to_hold_what_it_holds(tmp_path):
    write(tmp_path / "phone", [], {**dict.fromkeys(numbers("", 9, ".HEIC"), JUNK), "notes.txt": TEXT, ".hidden": TEXT})
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match="empty' is empty. It should hold images"):
        load(tmp_path / "empty")
    told = r"holds no images and no dataset files .* It has 9 \.heic, 1 \.txt\. 9 of 9 images .* such as pillow-heif"
    with pytest.raises(LabError, match=told):
        read(tmp_path / "phone")


def test_images_beside_dataset_files_are_counted(tmp_path, capsys):
    write(tmp_path / "data", numbers("", 3))
    datasets.Dataset.from_dict({"image": [numbered_image(9)]}).to_parquet(tmp_path / "data" / "train.parquet")
    assert load(tmp_path / "data").num_images == 1
    assert re.search(r"3 of 3 images .* \(the data are read from \.parquet\)\.", capsys.readouterr().err)


NAMES = ["a[1]", "hat?", "*", "50%41 #1", "a & b, c;d", "x~", "Fotos für Åse", "'q' \"r\"", "-a", "a:b"]


@cases("form", ["images", "parquet", "saved"])
@cases("stream", [{}, {"streaming": True, "max_train_steps": 9}])
def test_a_path_is_no_pattern(tmp_path, monkeypatch, form, stream):
    """Beside some of the folders is another one that their names would match as patterns."""
    monkeypatch.chdir(tmp_path)
    for level, name in enumerate([*NAMES, "a1", "hats"]):
        row = datasets.Dataset.from_dict({"image": [numbered_image(level)]})
        Path(name).mkdir()
        if form == "saved":
            row.save_to_disk(name)
        elif form == "images":
            numbered_image(level).save(f"{name}/train[1].png")
        else:
            row.to_parquet(f"{name}/train.parquet")
    for level, name in enumerate(NAMES if form != "parquet" else NAMES[:4]):  # the others take seconds
        options = {"cache_dir": str(tmp_path / "cache [1]"), **stream}
        if form == "parquet" and level < 3:
            with pytest.raises(LabError, match=r"--train_data_dir .*: must be a path without .* Hint: rename the folder"):
                load(Path(name), **options)
        else:
            assert levels(load(Path(name), **options).random_sample(1, 1)) == [level]
