"""A folder of images as a dataset of paths: its splits, classes from the names of folders, and tables of metadata."""

from __future__ import annotations

import functools
import io
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError, warn
from .folder_files import FolderFiles, ending_of
from .shard_rows import digest_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

warn_once = functools.cache(warn)


def open_image_folder(files: FolderFiles, split: str) -> datasets.Dataset:
    """
    The images of a split in the order of their paths, or of the rows of its metadata. Warns of images that are not read.

    `split` may be a slice or a sum, as for `datasets`: `"train[:10%]+test"`.
    """
    import datasets as hf_datasets

    splits = _rows_by_split(files)
    lengths = {name: len(rows) for name, rows in splits.items()}
    try:
        chosen = hf_datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except ValueError as error:
        raise ValueError(f"{error} Hint: --dataset_split {next(iter(lengths))}") from None
    if unread := files.describe_unread():
        warn_once(unread)
    dataset = hf_datasets.concatenate_datasets(
        [splits[each.splitname].select(range(each.from_, each.to)) for each in chosen]
    )
    dataset._fingerprint = digest_of([split, *files.versions()])
    return dataset


def _rows_by_split(files: FolderFiles) -> dict[str, datasets.Dataset]:
    """Columns `image`, and `label` if there are classes; or those of the metadata of a split."""
    import datasets as hf_datasets

    words = _folders_of_splits(files)
    names: dict[str, list[str]] = {split: [] for split in words.values() or ["train"]}
    for name in sorted(files.images, key=lambda name: [*words].index(_top(name))) if words else files.images:
        names[words.get(_top(name), "train")].append(name)
    classes = _find_classes(files, depth=1 if words else 0)
    described = _described_rows(files, words)
    found = {}
    for split, some in names.items():
        if split in described:
            found[split], named = described[split]
            if left := [files.images[name] for name in some if name not in named]:
                files.unread[f"{os.path.basename(files.metadata[0])} does not name these"] += left
            continue
        columns = {"image": [files.images[name] for name in some]}
        features = {"image": hf_datasets.Value("string")}
        if classes:
            columns["label"] = [_folder(name) for name in some]
            features["label"] = hf_datasets.ClassLabel(names=classes)
        rows = hf_datasets.Dataset.from_dict(columns, hf_datasets.Features(features))
        found[split] = rows.cast_column("image", hf_datasets.Image(decode=False))
    return found


def _top(name: str) -> str:
    """The folder at the top that an image is in, or the archive; empty for an image at the top."""
    return name.rpartition("/")[0].partition("/")[0].removesuffix(".zip")


def _folder(name: str) -> str:
    """The folder that an image is in."""
    return os.path.basename(os.path.dirname(name)).removesuffix(".zip")


def _folders_of_splits(files: FolderFiles) -> dict[str, str]:
    """The split of each folder at the top; empty unless all images are in folders that are named as splits of `datasets`."""
    from datasets.data_files import SPLIT_KEYWORDS

    known = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    tops = {_top(name) for name in files.images}
    if tops <= known.keys():
        return {word: split for word, split in known.items() if word in tops}
    below = {_top(name.partition("/")[2]) for name in files.images}
    if len(tops) == 1 and tops != {""} and below <= known.keys():
        inner = str(files.folder / tops.pop())
        warn_once(
            f"The folders {', '.join(sorted(below))} in {inner!r} are trained on together. They are splits only at the top: "
            f"give {inner!r} to train on one of them."
        )
    return {}


def _find_classes(files: FolderFiles, depth: int) -> list[str]:
    """The names of the folders that images are in, if all are equally deep, and below `depth`; empty for fewer than two."""
    depths = {name.count("/") for name in files.images}
    found = sorted({_folder(name) for name in files.images})
    return found if len(depths) == 1 and depths.pop() > depth and len(found) > 1 else []


def _described_rows(files: FolderFiles, words: dict[str, str]) -> dict[str, tuple[datasets.Dataset, set[str]]]:
    """The rows of metadata by split, and the names of their images."""
    import datasets as hf_datasets

    parts = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    for path in files.metadata:
        rows, named = _read_metadata(files, path)
        splits = [words.get(_top(name), next(iter(words.values()), "train")) for name in named]
        for split in dict.fromkeys(splits):
            chosen = [row for row, each in enumerate(splits) if each == split]
            parts[split].append(rows.select(chosen))
            names[split] |= {named[row] for row in chosen}
    return {split: (hf_datasets.concatenate_datasets(parts[split]), names[split]) for split in parts}


def _read_metadata(files: FolderFiles, path: str) -> tuple[datasets.Dataset, list[str]]:
    """
    The rows of a table of metadata, and the names of their images. A column `file_name` becomes the column `image`, and
    `mask_file_name` a column `mask` of images, too.
    """
    import datasets as hf_datasets
    import pyarrow as pa

    table = _read_table(path)
    images = {name: name.removesuffix("_file_name") for name in table.column_names if name.endswith("_file_name")}
    if "file_name" in table.column_names:
        images["file_name"] = "image"  # the last one, which names the rows
    if not images:
        raise LabError(
            f"{path!r} has no column file_name, which names the image of each row; it has "
            f"{', '.join(map(repr, table.column_names)) or 'none'}. Add it; columns of a csv file are separated by commas."
        )
    if not len(table):
        raise LabError(f"{path!r} has no rows. Hint: add a row for each image, or remove the file to train without it.")
    if twice := [name for name in images.values() if name in table.column_names or [*images.values()].count(name) > 1]:
        column = next(name for name, image in images.items() if image == twice[0])
        raise LabError(
            f"{path!r} has columns {column!r} and {twice[0]!r}; the former becomes {twice[0]!r}. Rename one of them."
        )
    names: list[str] = []
    for column, image in images.items():
        cells = [
            os.path.normpath(os.path.join(os.path.dirname(path), str(cell))) if cell else None
            for cell in table[column].to_pylist()
        ]
        names = [files.name_of(cell) if cell else "" for cell in cells]
        for name in names:
            if name.startswith(".."):
                raise LabError(f"{path!r} names {name!r}, which is outside of the folder. Correct or remove that row.")
        table = table.set_column(table.column_names.index(column), image, pa.array(cells, pa.string()))
    rows = hf_datasets.Dataset(hf_datasets.table.InMemoryTable(table))
    for image in images.values():
        rows = rows.cast_column(image, hf_datasets.Image(decode=False))
    return rows, names


def _read_table(path: str) -> pa.Table:
    import pandas
    import pyarrow as pa
    from pyarrow import json, parquet

    content = Path(path).read_bytes()
    try:
        if ending_of(path) != ".parquet":
            content.decode()  # pyarrow checks texts only when they are used
        if ending_of(path) == ".csv":
            return pa.Table.from_pandas(pandas.read_csv(io.BytesIO(content)), preserve_index=False)
        if ending_of(path) == ".jsonl":
            return json.read_json(io.BytesIO(content), json.ReadOptions(block_size=max(len(content), 1)))
        return parquet.read_table(io.BytesIO(content))
    except ValueError as error:  # also of pandas and pyarrow
        form = {".csv": "columns separated by commas", ".jsonl": "a JSON object in each line"}.get(
            ending_of(path), "Parquet"
        )
        raise LabError(f"{path!r} cannot be read ({error}). Save it as UTF-8 with {form}.") from None
