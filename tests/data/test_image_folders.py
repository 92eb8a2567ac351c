"""Folders as users have them: which images are read, with which labels, and what is said about those that are not."""

import json
import os
import re
import zipfile
from pathlib import Path

import datasets
import pytest
from helpers import load, numbered_image, png, write_tar
from tables import cases

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.data.options import DataConfig
from diffusers_lrlab.data.sources import open_dataset

TEXT, JUNK = "a grey square", b"\0\1not an image\xff" * 9


def numbers(folder, count, ending=".png", start=0):
    """Names of images."""
    return [f"{folder}{number:03}{ending}" for number in range(start, start + count)]


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
        write(folder.parent / "inside", inside)
        with zipfile.ZipFile(folder / name, "w") as archive:
            for each in inside:
                archive.write(folder.parent / "inside" / each, each)


def read(folder, split="train"):
    """Names of the rows relative to the folder, and their labels; a stream has the same."""
    found = []
    for streaming in (False, True):
        rows = open_dataset(DataConfig(train_data_dir=str(folder), dataset_split=split, streaming=streaming))
        rows = rows.cast_column("image", datasets.Image(decode=False))
        labels = getattr(rows.features.get("label"), "names", None)
        cells = [(os.path.relpath(row["image"]["path"], folder), labels and labels[row["label"]]) for row in rows]
        found.append(cells)
    assert found[0] == found[1]
    return found[0]


JSONL = "".join(f'{{"file_name": "{name}", "text": "x"}}\n' for name in numbers("", 6))

# Name: arguments of `write`; rows; labels; the end of the warning, or None for none.
FOLDERS = {
    "one is named train": ([*numbers("", 9), "train.png"], {}, 10, None, None),
    "one is named test": ([*numbers("", 9), "test.png", "my test 1.png"], {}, 11, None, None),
    "classes, one named train": (
        [*numbers("bus/", 4), *numbers("car/", 4), *numbers("train/", 4)], {}, 12, {"bus", "car", "train"}, None,
    ),
    "years and shoots": (
        [*numbers("2019/", 3), *numbers("2020-test-shoot/", 3), *numbers("train ride/", 3)],
        {}, 9, {"2019", "2020-test-shoot", "train ride"}, None,
    ),
    "splits": ([*numbers("train/", 4), *numbers("test/", 3)], {"others": {"README.md": TEXT}}, 4, None, None),
    "splits of classes": (
        [*numbers("train/x/", 2), *numbers("train/y/", 2), *numbers("valid/x/", 2)], {}, 4, {"x", "y"}, None,
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
        numbers("", 3), {"links": {"x.png": "000.png", "y.png": "gone.png", "z.png": "/dev/zero"}},
        4, None, r"2 of 6 images .* were not read: 2 such as 'y\.png' \(not a file, or a link that leads nowhere\)\.",
    ),
    "photos of a phone": (
        numbers("", 3, ".JPG"), {"others": dict.fromkeys(numbers("trip/", 5, ".HEIC"), JUNK)},
        3, None, r"5 of 8 images .* 5 such as 'trip/000\.HEIC' \(\.heic needs PIL's plug-in: install pillow-heif\)\.",
    ),
    "raw files of a camera": (
        numbers("", 3, ".jpeg"), {"others": dict.fromkeys(numbers("", 2, ".NEF"), JUNK)},
        3, None, r"2 of 5 images .*\(PIL does not read \.nef: convert these to PNG or JPEG\)",
    ),
    "no endings, and wrong ones": (
        numbers("", 3),
        {"others": {"LICENSE": TEXT, "script": TEXT}, "links": {"photo": "000.png", "b.png_large": "001.png"}},
        3, None, r"2 of 5 images .* 1 such as 'photo' \(the name has no ending.* 1 such as 'b\.png_large' \(\.png_large is",
    ),
    "metadata of a part": (
        numbers("", 24), {"others": {"metadata.jsonl": JSONL}},
        6, None, r"18 of 24 images .* 18 such as '006\.png' \(metadata\.jsonl does not name these\)\.",
    ),
    "metadata of nothing else": (
        numbers("", 3), {"others": {"metadata.csv": "file_name\n001.png\n"}}, 1, None, r"2 of 3 images",
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
        [], {"archives": {"cats.zip": ["1.png", "2.PNG"], "dogs.zip": ["1.png", "__MACOSX/1.png"]}},
        3, {"cats", "dogs"}, None,
    ),
    "metadata in an archive": (
        [], {"archives": {"more.zip": ["1.png", "metadata.csv"]}},
        1, None, r"^warning: 'more\.zip/metadata\.csv' was not read: unpack the archive to use it\.",
    ),
    "photos and an archive": (numbers("", 3), {"archives": {"more.zip": ["x/1.png", "y.png"]}}, 5, None, None),
    "a damaged archive": (
        numbers("", 3), {"others": {"more.zip": JUNK}},
        3, None, r"1 of 4 .*'more\.zip' \(the archive is damaged: .*zip file\)",
    ),
    "a name that is not UTF-8": (
        numbers("", 3), {"others": {os.fsdecode(b"\xe9t\xe9.png"): JUNK}},
        3, None, r"1 of 4 images .* 1 such as b'\\xe9t\\xe9\.png' \(rename these in UTF-8\)\.",
    ),
    "double underscores": ([*numbers("__selected/", 3), *numbers("other/", 2)], {}, 5, {"__selected", "other"}, None),
    "strange names": (
        ["a[1]/[x]*?.png", "a{2}/#%41.png", "å ü/~a,b;c.png", "$HOME/y::z.png"],
        {}, 4, {"a[1]", "a{2}", "å ü", "$HOME"}, None,
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
    said = capsys.readouterr().err
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
    ("content", "told"),
    [
        ("file_name;text\n000.png;x\n", r"has no column file_name, .* it has 'file_name;text'\. .* separated by commas"),
        (
            "file_name,text\n000.png,\xe9t\xe9\n".encode("cp1252"),
            r"metadata\.csv' cannot be read \(.*utf-8.*Save it as UTF-8",
        ),
        ("text\nx\n", r"has no column file_name, .* it has 'text'"),
        ("", r"metadata\.csv' cannot be read \(.*\)\. Save it as UTF-8 with columns separated by commas"),
        ("file_name,text\n", r"metadata\.csv' has no rows\. Hint: add a row for each image, or remove the file"),
    ],
)
def test_metadata_that_cannot_be_read_are_named_with_the_remedy(tmp_path, content, told):
    write(tmp_path / "photos", numbers("", 2), {"metadata.csv": content})
    with pytest.raises(LabError, match=told):
        read(tmp_path / "photos")


def test_lines_of_metadata_that_are_not_utf8_are_named(tmp_path):
    write(tmp_path / "photos", numbers("", 2), {"metadata.jsonl": b'{"file_name": "000.png", "text": "\xe9t\xe9"}\n'})
    with pytest.raises(LabError, match=r"metadata\.jsonl' cannot be read \(.*utf-8.*Save it as UTF-8 with a JSON object"):
        read(tmp_path / "photos")


def test_the_column_file_name_names_the_rows_wherever_it_is(tmp_path, capsys):
    content = "mask_file_name,file_name\nmasks/001.png,000.png\n"
    write(tmp_path / "photos", [*numbers("", 1), "masks/001.png"], {"metadata.csv": content})
    assert [name for name, _ in read(tmp_path / "photos")] == ["000.png"]
    assert "1 such as 'masks/001.png'" in capsys.readouterr().err


def test_a_folder_without_images_is_said_to_hold_what_it_holds(tmp_path):
    write(tmp_path / "phone", [], {**dict.fromkeys(numbers("", 9, ".HEIC"), JUNK), "notes.txt": TEXT})
    told = r"holds no images and no dataset files .* It has 9 \.heic, 1 \.txt\. 9 of 9 images .* install pillow-heif\)\."
    with pytest.raises(LabError, match=told):
        read(tmp_path / "phone")
    write(tmp_path / "hidden", [], {".notes.txt": TEXT})
    with pytest.raises(LabError, match=r"It has no files\."):
        read(tmp_path / "hidden")


def test_images_beside_dataset_files_are_counted(tmp_path, capsys):
    write(tmp_path / "data", numbers("", 3))
    datasets.Dataset.from_dict({"image": [numbered_image(9)]}).to_parquet(tmp_path / "data" / "train.parquet")
    assert load(tmp_path / "data").num_images == 1
    assert re.search(r"3 of 3 images .* \(the data are read from \.parquet\)\.", capsys.readouterr().err)


# --- paths -----------------------------------------------------------------------------------------------------------

NAMES = [
    *("a[1]", "a[!b]", "hat?", "%{a,b}*#"),
    *("*", "^!", "50%41 #1", "a & b, c;d", "x~", "Fotos für Åse", "'q' \"r\"", "-a", "a:b"),
]


POINTS = {"data_kind": "points", "resolution": None, "image_channels": None}
FORMS = {"images": {}, "parquet": {}, "jsonl": POINTS, "tar": {"image_column": "png"}, "saved": {}}


def write_data(folder, form, level):
    """A row: an image of a level, or the same as a point of one number."""
    folder.mkdir()
    row = datasets.Dataset.from_dict({"image": [numbered_image(level)]})
    if form == "images":
        numbered_image(level).save(folder / "train[1].png")
    elif form == "parquet":
        row.to_parquet(folder / "train[1].parquet")
    elif form == "saved":
        row.save_to_disk(str(folder))
    elif form == "tar":
        write_tar(folder / "0[1].tar", [("0.png", png(level))])
    else:
        (folder / "0[1].jsonl").write_text(json.dumps({"x": [level / 127.5 - 1]}))


@pytest.mark.parametrize("form", FORMS)
def test_a_path_is_no_pattern(tmp_path, monkeypatch, form):
    """Beside some of the folders is another one that their names would match as patterns."""
    monkeypatch.chdir(tmp_path)
    names = NAMES if form in ("images", "saved") else NAMES[:4]  # the others take seconds
    for level, name in enumerate([*names, "a1", "ac", "hats"]):
        write_data(tmp_path / name, form, level)
    for level, name in enumerate(names):
        for stream in ({}, {"streaming": True, "max_train_steps": 9}):
            data = load(Path(name), cache_dir=str(tmp_path / "cache [1]"), **FORMS[form], **stream)
            assert data.random_sample(1, 1).data.flatten()[0].item() == pytest.approx(level / 127.5 - 1)
