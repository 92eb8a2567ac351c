"""Cache of resized images in a file, from which later runs on the same data read them instead of decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset

from ..core.environment import available_cores
from ..core.errors import LabError, warn
from ..core.files import atomic_folder, expanded
from ..core.worker_process import end_with_parent
from .images import ImageTransform
from .options import DataConfig

_FORMAT = 2
_PIXELS, _SIZES, _PROBLEMS = "pixels.bin", "sizes.npy", "problems.json"
_SAMPLE = 64  # images from whose sizes the size of the file is estimated
_SPARE = 2**30  # bytes to leave free on the disk


class DecodedImages(Sequence[torch.Tensor]):
    """The cached images, uint8 `(channels, height, width)` each; a `LabError` for one that could not be decoded."""

    def __init__(self, folder: Path, channels: int):
        self.folder, self.channels = folder, channels
        try:
            self.sizes = np.load(folder / _SIZES)  # heights and widths; 0 where nothing could be decoded
            self.problems: dict[str, str] = json.loads((folder / _PROBLEMS).read_text(encoding="utf-8"))
            self._ends = self.sizes.prod(axis=1).cumsum() * channels
            size = int(self._ends[-1]) if len(self._ends) else 0
            if (folder / _PIXELS).stat().st_size != size:
                raise ValueError
        except (EOFError, FileNotFoundError, ValueError):
            raise LabError(f"{str(folder)!r}, the cache of --cache_decoded, is damaged. Remove that folder.") from None
        self.pixels = np.memmap(folder / _PIXELS, np.uint8, "r") if size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: Any) -> Any:
        if str(row) in self.problems:
            raise LabError(self.problems[str(row)])
        height, width = self.sizes[row].tolist()
        end = int(self._ends[row])
        levels = np.array(self.pixels[end - self.channels * height * width : end])
        return torch.from_numpy(levels).view(self.channels, height, width)

    def __getstate__(self) -> Any:
        return (self.folder, self.channels)

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a worker maps the file itself


class _Decoder(Dataset[Any]):
    def __init__(self, cells: Any, transform: ImageTransform):
        self.cells, self.transform = cells, transform

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, row: int) -> torch.Tensor | str:
        try:
            pixels = self.transform.read_compact(self.cells[row])
        except LabError as error:
            return str(error)
        return (self.transform.fixed(pixels) if self.transform.center_crop else pixels).contiguous()


def decoded_images(cells: Any, fingerprint: str, transform: ImageTransform, config: DataConfig) -> DecodedImages:
    """The cached images of cells, which are decoded now if there is no cache for this fingerprint and transform."""
    import PIL
    from datasets import config as datasets_config
    from datasets.fingerprint import Hasher

    what = {**dataclasses.asdict(transform), "seed": 0, "random_flip": False}
    key = Hasher.hash([_FORMAT, fingerprint, what, PIL.__version__])
    folder = expanded(config.cache_dir or datasets_config.HF_DATASETS_CACHE) / "lrlab-decoded" / key
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():  # otherwise another process has written it
                _write(folder, _Decoder(cells, transform), config.skip_corrupt_images)
    return DecodedImages(folder, transform.channels)


def _write(folder: Path, decoder: _Decoder, skip_corrupt: bool) -> None:
    needed = _bytes_needed(decoder)
    free = shutil.disk_usage(folder.parent).free
    if needed + _SPARE > free:
        raise LabError(
            f"--cache_decoded needs {needed / 2**30:,.1f} GiB in {str(folder.parent)!r}, where {free / 2**30:,.1f} are "
            "free, and 1 must stay free. Choose a folder on another disk with --cache_dir, or leave --cache_decoded out."
        )
    warn(f"--cache_decoded writes about {needed / 2**20:,.1f} MiB into {str(folder)!r}.")
    sizes: list[tuple[int, ...]] = []
    problems: dict[int, str] = {}
    with atomic_folder(folder) as temporary:
        with (temporary / _PIXELS).open("wb") as file:
            for row, pixels in enumerate(_decoded(decoder)):
                if isinstance(pixels, str):
                    if not skip_corrupt:
                        raise LabError(pixels)
                    problems[row] = pixels
                    sizes.append((0, 0))
                else:
                    sizes.append(tuple(pixels.shape[1:]))
                    file.write(pixels.numpy().tobytes())
        np.save(temporary / _SIZES, np.array(sizes, np.int64).reshape(-1, 2))
        (temporary / _PROBLEMS).write_text(json.dumps(problems), encoding="utf-8")


def _bytes_needed(decoder: _Decoder) -> int:
    rows = np.linspace(0, len(decoder) - 1, min(_SAMPLE, len(decoder))).astype(int)
    known = [pixels.numel() for row in rows.tolist() if not isinstance(pixels := decoder[row], str)]
    return round(len(decoder) * sum(known) / max(1, len(known)))


def _decoded(decoder: _Decoder) -> Iterator[torch.Tensor | str]:
    from tqdm.auto import tqdm

    workers = 0 if len(decoder) < 10 * _SAMPLE else available_cores() - 1
    loader: DataLoader[Any] = DataLoader(
        decoder,
        batch_size=_SAMPLE,
        collate_fn=list,
        num_workers=workers,
        worker_init_fn=end_with_parent,
        generator=torch.Generator(),
    )
    batches = iter(loader)  # given the loader, tqdm.auto would start a second iteration with its own workers
    for batch in tqdm(
        batches, desc="decode images", total=len(loader), unit=f" x {_SAMPLE}", disable=None, leave=False, delay=2
    ):
        yield from batch
