"""A folder of images as a dataset of paths: its files, splits, classes from the names of folders, and tables of metadata."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, warn
from ..core.files import expanded
from ..core.words import agreeing, counted

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# Readers of tables of metadata, by ending, and how such a table is saved.
_METADATA = {".csv": "columns separated by commas", ".jsonl": "a JSON object in each line", ".parquet": "Parquet"}
_NO_IMAGES = ("HDF5", "MPEG")  # formats that PIL knows by name only
_PLUGINS = ("pillow_heif", "pillow_avif", "pillow_jxl")  # packages by which PIL reads further formats
# Endings of images that PIL reads with a plug-in only, or not at all: of phones, of cameras, and drawings.
_OTHER_IMAGES = {
    *(".heic", ".heif", ".hif", ".avif", ".jxl", ".svg"),
    *(".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"),
}

warn_once = functools.cache(warn)


def digest_of(facts: Iterable[Any]) -> str:
    """A short hash of facts, the same on every machine."""
    found = hashlib.sha256()
    for fact in facts:
        found.update(repr(fact).encode() + b"\n")
    return found.hexdigest()[:32]


@functools.cache
def image_endings() -> frozenset[str]:
    """The endings of files that PIL reads here, also by the packages above, which this registers."""
    from PIL import Image

    Image.preinit()  # these formats are tried first
    Image.init()
    for module in _PLUGINS:
        with suppress(ImportError):
            plugin = importlib.import_module(module)
            getattr(plugin, "register_heif_opener", lambda: None)()
    known = Image.registered_extensions().items()
    return frozenset(ending for ending, name in known if name in Image.OPEN and name not in _NO_IMAGES)


def ending_of(path: str) -> str:
    return os.path.splitext(path)[1].lower()


class FolderFiles:
    """The files below a folder, but for hidden ones. Links are followed, each folder once."""

    def __init__(self, folder: Path):
        self.folder = expanded(folder).resolve()
        self.images: dict[str, str] = {}  # paths by name, which is relative to the folder
        self.metadata: list[str] = []
        self.others: list[str] = []
        self.unread: dict[str, list[str]] = defaultdict(list)  # paths of images, and of folders and links, by reason
        for path in sorted(self._walk()):
            ending = ending_of(path)
            if ending in image_endings() and os.fsencode(path).decode(errors="replace") != path:
                self.unread["rename these in UTF-8"].append(path)
            elif ending in image_endings():
                self.images[self.name_of(path)] = path
            elif os.path.basename(path) == f"metadata{ending}" and ending in _METADATA:
                self.metadata.append(path)
            else:
                self.others.append(path)
                if ending in _OTHER_IMAGES:
                    self.unread["install a plug-in of PIL, such as pillow-heif, or convert these to PNG"].append(path)
                elif ending == ".zip":
                    self.unread["archives are read in a folder without other images: unpack it"].append(path)

    def name_of(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def _walk(self) -> Iterator[str]:
        seen = set()
        folders, linked = [str(self.folder)], list[str]()
        while folders or linked:  # links come after the folders that are there themselves
            here = folders.pop() if folders else linked.pop(0)
            try:
                facts = os.stat(here)
                entries = (
                    [] if (facts.st_dev, facts.st_ino) in seen else sorted(os.scandir(here), key=lambda each: each.name)
                )
            except OSError as error:
                self.unread[f"{error.strerror}"].append(here)
                continue
            seen.add((facts.st_dev, facts.st_ino))
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.name.startswith(".") or entry.name == "__MACOSX":
                    continue
                if os.path.isfile(entry):
                    yield entry.path
                elif not os.path.isdir(entry):
                    self.unread["not a file, or a link that leads nowhere"].append(entry.path)
                elif not entry.is_symlink():
                    folders.append(entry.path)
                elif not self.folder.is_relative_to(os.path.realpath(entry)):  # otherwise it is a loop
                    linked.append(entry.path)

    def versions(self) -> Iterator[tuple[str, int, int]]:
        """The name, size and time of last change of each file that is read."""
        for path in (*self.images.values(), *self.metadata):
            facts = os.stat(path)
            yield self.name_of(path), facts.st_size, facts.st_mtime_ns

    def contents(self) -> str:
        """The numbers of files by ending, in words."""
        endings = Counter(ending_of(path) for path in (*self.images, *self.metadata, *self.others))
        found = [f"{number:,} {ending or 'without an ending'}" for ending, number in endings.most_common()]
        return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "") or "no files"

    def describe_unread(self) -> str:
        """The number, examples and reasons of the images that are not read; empty if all are."""
        if not self.unread:
            return ""
        missed = {path for paths in self.unread.values() for path in paths}
        total = len(missed | {*self.images.values()})
        parts = [f"{len(paths):,} such as {self.name_of(paths[0])!r} ({reason})" for reason, paths in self.unread.items()]
        return (
            f"{len(missed):,} of {counted(total, 'image', ',')} in {str(self.folder)!r} "
            f"{agreeing(len(missed), 'was', 'were')} not read: {'; '.join(parts)}."
        )


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
    parts = [splits[each.splitname].select(range(each.from_, each.to)) for each in chosen]
    dataset = hf_datasets.concatenate_datasets(parts)
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
    """The folder at the top that an image is in; empty for an image at the top."""
    return name.rpartition("/")[0].partition("/")[0]


def _folder(name: str) -> str:
    """The folder that an image is in."""
    return os.path.basename(os.path.dirname(name))


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
    """The rows of a table of metadata, whose column `file_name` becomes `image`, and the names of their images."""
    import datasets as hf_datasets
    import pyarrow as pa

    table = _read_table(path)
    if "file_name" not in table.column_names:
        raise LabError(
            f"{path!r} has no column file_name, which names the image of each row; it has "
            f"{', '.join(map(repr, table.column_names)) or 'none'}. Add it; columns of a csv file are separated by commas."
        )
    if not len(table):
        raise LabError(f"{path!r} has no rows. Hint: add a row for each image, or remove the file to train without it.")
    folder, cells = os.path.dirname(path), table["file_name"].to_pylist()
    paths = [os.path.normpath(os.path.join(folder, str(cell))) if cell else None for cell in cells]
    table = table.set_column(table.column_names.index("file_name"), "image", pa.array(paths, pa.string()))
    rows = hf_datasets.Dataset(hf_datasets.table.InMemoryTable(table))
    names = [files.name_of(each) if each else "" for each in paths]
    return rows.cast_column("image", hf_datasets.Image(decode=False)), names


def _read_table(path: str) -> pa.Table:
    import pandas
    import pyarrow as pa
    from pyarrow import json, parquet

    content, ending = Path(path).read_bytes(), ending_of(path)
    try:
        if ending != ".parquet":
            content.decode()  # pyarrow checks texts only when they are used
        if ending == ".csv":
            return pa.Table.from_pandas(pandas.read_csv(io.BytesIO(content)), preserve_index=False)
        if ending == ".jsonl":
            return json.read_json(io.BytesIO(content), json.ReadOptions(block_size=max(len(content), 1)))
        return parquet.read_table(io.BytesIO(content))
    except ValueError as error:  # also of pandas and pyarrow
        raise LabError(f"{path!r} cannot be read ({error}). Save it as UTF-8 with {_METADATA[ending]}.") from None
