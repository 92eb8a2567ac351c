"""The files of a folder of images: those that are read, and a count of the images that are not."""

from __future__ import annotations

import functools
import importlib
import os
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..core.files import expanded
from ..core.words import agreeing, counted

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
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
            elif os.path.basename(path) in METADATA:
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
            elif os.path.basename(member) in METADATA and not is_hidden:
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
