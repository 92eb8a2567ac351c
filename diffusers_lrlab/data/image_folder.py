"""A folder of images as a dataset of paths: its files, splits, classes from the names of folders, and tables of metadata."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import zipfile
from collections import Counter, defaultdict, deque
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

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_NO_IMAGES = ("HDF5", "MPEG")  # formats that PIL knows by name only
# Packages by which PIL reads further formats: their modules, and the endings of these formats.
_PLUGINS = {
    "pillow-heif": ("pillow_heif", (".heic", ".heif", ".hif")),
    "pillow-avif-plugin": ("pillow_avif", (".avif", ".avifs")),  # which newer versions of PIL read themselves
    "pillow-jxl-plugin": ("pillow_jxl", (".jxl",)),
}
_CONVERT = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2", ".svg")  # raw files of cameras, and drawings
_COMMON = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
_LOOKED_AT = 20  # files of another ending that are opened to find out whether they are images

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
    for module, _ in _PLUGINS.values():
        with suppress(ImportError):
            plugin = importlib.import_module(module)
            getattr(plugin, "register_heif_opener", lambda: None)()
    known = Image.registered_extensions().items()
    return frozenset(ending for ending, name in known if name in Image.OPEN and name not in _NO_IMAGES)


def ending_of(path: str) -> str:
    return os.path.splitext(path)[1].lower()


class FolderFiles:
    """
    The files below a folder, but for hidden ones. Links are followed, each folder once.

    Images in zip archives have the path `zip://MEMBER::ARCHIVE`, and names as if the archive was a folder.
    """

    def __init__(self, folder: Path):
        self.folder = expanded(folder).resolve()
        self.images: dict[str, str] = {}  # paths by name, which is relative to the folder
        self.metadata: list[str] = []
        self.others: list[str] = []
        self.unread: dict[str, list[str]] = defaultdict(list)  # paths by reason
        self.archives: list[str] = []
        self.packed_metadata: list[str] = []  # names, in archives
        for path in sorted(self._walk()):
            if ending_of(path) in image_endings():
                if os.fsencode(path).decode(errors="replace") == path:
                    self.images[self.name_of(path)] = path
                else:
                    self.unread["rename these in UTF-8"].append(path)
            elif os.path.basename(path) in _METADATA:
                self.metadata.append(path)
            else:
                (self.archives if ending_of(path) == ".zip" else self.others).append(path)
        for path in self.archives:
            if members := dict(self._images_in_archive(path)):
                self.images |= members
            else:
                self.others.append(path)

    def name_of(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def _walk(self) -> Iterator[str]:
        seen = set()
        linked = deque([str(self.folder)])  # links come after the folders that are there themselves
        while linked:
            pending = [linked.popleft()]
            while pending:
                here = pending.pop()
                try:
                    facts = os.stat(here)
                    entries = [] if (facts.st_dev, facts.st_ino) in seen else [*os.scandir(here)]
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
                        pending.append(entry.path)
                    elif not self.folder.is_relative_to(os.path.realpath(entry)):  # otherwise it is a loop
                        linked.append(entry.path)

    def _images_in_archive(self, path: str) -> Iterator[tuple[str, str]]:
        try:
            with zipfile.ZipFile(path) as archive:
                members = sorted(archive.namelist())
        except (OSError, zipfile.BadZipFile) as error:
            self.unread[f"the archive is damaged: {error}"].append(path)
            return
        for member in members:
            is_hidden = any(part.startswith(".") or part == "__MACOSX" for part in member.split("/"))
            name = f"{self.name_of(path)}/{member}"
            if ending_of(member) in image_endings() and not is_hidden:
                yield name, f"zip://{member}::{path}"
            elif os.path.basename(member) in _METADATA and not is_hidden:
                self.packed_metadata.append(name)

    def versions(self) -> Iterator[tuple[str, int, int]]:
        """The name, size and time of last change of each file that is read."""
        plain = (path for path in self.images.values() if not path.startswith("zip://"))
        for path in (*plain, *self.archives, *self.metadata):
            facts = os.stat(path)
            yield self.name_of(path), facts.st_size, facts.st_mtime_ns

    def contents(self) -> str:
        """The numbers of files by ending, in words."""
        unread = [path for paths in self.unread.values() for path in paths]
        endings = Counter(ending_of(path) for path in {*self.images, *self.metadata, *self.others, *unread})
        found = [f"{number:,} {ending or 'without an ending'}" for ending, number in endings.most_common()]
        return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "") or "no files"

    def describe_unread(self) -> str:
        """The number, examples and reasons of the images and the metadata that are not read; empty if all are."""
        unread = {**self.unread}
        of_ending = defaultdict(list)
        for path in self.others:
            of_ending[ending_of(path)].append(path)
        for ending, paths in of_ending.items():
            reason, images = _unread_images(ending, paths)
            if images:
                unread[reason] = [*unread.get(reason, []), *images]
        packed = f" {self.packed_metadata[0]!r} was not read: unpack the archive to use it." if self.packed_metadata else ""
        if not unread:
            return packed.strip()
        missed = {path for paths in unread.values() for path in paths}
        total = len(missed | {*self.images.values()})
        parts = [f"{len(paths):,} such as {self._example(paths[0])} ({reason})" for reason, paths in unread.items()]
        return (
            f"{len(missed):,} of {counted(total, 'image', ',')} in {str(self.folder)!r} "
            f"{agreeing(len(missed), 'was', 'were')} not read: {'; '.join(parts)}.{packed}"
        )

    def _example(self, path: str) -> str:
        name = self.name_of(path)
        return repr(name) if name.isprintable() else repr(os.fsencode(name))


def _unread_images(ending: str, paths: list[str]) -> tuple[str, list[str]]:
    """Why files of an ending are not read, and those among them that are images."""
    for package, (_, endings) in _PLUGINS.items():
        if ending in endings:
            return f"{ending} needs PIL's plug-in: install {package}", paths
    if ending in _CONVERT:
        return f"PIL does not read {ending}: convert these to PNG or JPEG", paths
    found = paths if any(map(_is_image, paths[:_LOOKED_AT])) else []
    why = f"{ending} is not an ending of images" if ending else "the name has no ending"
    return f"{why}: add .png or .jpg", [path for path in found if _is_image(path)]


def _is_image(path: str) -> bool:
    from PIL import Image

    try:
        with Image.open(path, formats=_COMMON):
            return True
    except Exception:  # decoders raise many types for what is not an image
        return False


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
    names: list[str] = []
    for column, image in images.items():
        cells = [
            os.path.normpath(os.path.join(os.path.dirname(path), str(cell))) if cell else None
            for cell in table[column].to_pylist()
        ]
        names = [files.name_of(cell) if cell else "" for cell in cells]
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
