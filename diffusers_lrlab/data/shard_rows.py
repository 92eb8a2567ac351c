"""Rows of a stream's shards: counted once for each shard, with a digest of the rows."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.files import full_disk_explained


def digest_of(facts: Iterable[Any]) -> str:
    """A short hash of facts, the same on every machine."""
    found = hashlib.sha256()
    for fact in facts:
        found.update(repr(fact).encode() + b"\n")
    return found.hexdigest()[:32]


@contextmanager
def read_errors_explained(failure: str, remedy: str) -> Iterator[None]:
    """Makes a `LabError` of any error of a source, whose network errors `datasets` has already retried."""
    try:
        yield
    except LabError:
        raise
    except Exception as error:  # of fsspec, pyarrow, httpx, tarfile and the system
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise LabError(f"{failure} ({reason}). {remedy}") from error


def count_rows(facts_of: Callable[[int], Iterator[Any]], places: Sequence[str], path: Path) -> tuple[list[int], list[str]]:
    """
    The number of rows of each shard, which `places` names, and a digest of the facts about them. Both are appended shard by
    shard to the file `path`, which must be specific to these data.
    """
    from tqdm.auto import tqdm

    found = _found_before(path, len(places))
    missing = [shard for shard in range(len(places)) if shard not in found]
    for shard in tqdm(missing, desc="count the rows of shards", disable=None, leave=False, delay=2):
        remedy = "Start again when it can be read; earlier shards are not counted again. Replace it if it is damaged."
        with read_errors_explained(f"The rows of {places[shard]} could not be counted", remedy):
            facts = list(facts_of(shard))
        found[shard] = (digest_of(facts), len(facts))
        line = json.dumps([shard, *found[shard]])
        with full_disk_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # in one write, since other processes may write too
                file.write(f"\n{line}\n".encode())
    digests, lengths = zip(*(found[shard] for shard in range(len(places))), strict=True)
    return list(lengths), list(digests)


def _found_before(path: Path, num_shards: int) -> dict[int, tuple[str, int]]:
    """Digests and numbers of rows in the file, by shard; damaged or incomplete lines are ignored."""
    found: dict[int, tuple[str, int]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            shard, digest, rows = json.loads(line)
            if type(shard) is int and 0 <= shard < num_shards and type(digest) is str and type(rows) is int:
                found[shard] = (digest, rows)
    return found
