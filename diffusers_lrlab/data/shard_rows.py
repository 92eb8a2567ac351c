"""Cache of facts about the rows of a stream's shards, found once for each shard."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core.files import full_disk_explained
from .retries import read_with_retries


def digest_of(facts: Iterable[Any]) -> str:
    """A short hash of facts, the same on every machine."""
    found = hashlib.sha256()
    for fact in facts:
        found.update(repr(fact).encode() + b"\n")
    return found.hexdigest()[:32]


def find_rows(
    rows_of: Callable[[int], Iterator[tuple[Any, Any]]],
    num_shards: int,
    name: str,
    path: Path,
    keep: Callable[[list[Any]], Any],
) -> list[tuple[str, Any]]:
    """
    For each shard, a digest of the facts about its rows, and the result of `keep` for their locations. `rows_of` gives the
    location and the facts of each row of a shard. Results are appended shard by shard to the file `path`, which must be
    specific to these data.
    """
    from tqdm.auto import tqdm

    found = _found_before(path, num_shards, type(keep([])))
    missing = [shard for shard in range(num_shards) if shard not in found]
    for shard in tqdm(missing, desc="count the rows of shards", disable=None, leave=False, delay=2):
        rows = read_with_retries(
            partial(rows_of, shard),
            failure=f"The rows of shard {shard} of {name!r} could not be counted",
            remedy="Start again when it can be read; earlier shards are not counted again.",
        )
        found[shard] = (digest_of(facts for _, facts in rows), keep([location for location, _ in rows]))
        line = json.dumps([shard, *found[shard]])
        with full_disk_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # in one write, since other processes may write too
                file.write(f"\n{line}\n".encode())
    return [found[shard] for shard in range(num_shards)]


def _found_before(path: Path, num_shards: int, kind: type) -> dict[int, tuple[str, Any]]:
    """Results in the file by shard; damaged or incomplete lines are ignored."""
    found: dict[int, tuple[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            shard, digest, kept = json.loads(line)
            if type(shard) is int and 0 <= shard < num_shards and type(digest) is str and type(kept) is kind:
                found[shard] = (digest, kept)
    return found
