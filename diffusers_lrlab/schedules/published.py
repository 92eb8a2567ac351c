"""Schedules as small data files, in a folder or on the Hub (`--lr_scheduler hub:USER/NAME`)."""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError, warn
from ..core.hub_client import HubSilent, limit_waiting, without_tokens
from ..core.spec import format_spec
from ..core.words import counted
from .registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from .schedule import Schedule

PREFIX = "hub:"
FILE = "schedule.json"
_FORMAT = "diffusers_lrlab schedule 1"
_LARGEST = 64 * 1024  # bytes
_KEYS = ("format", "lr_scheduler", "lr_scheduler_kwargs", "momentum_scheduler", "momentum_scheduler_kwargs")


@dataclass(frozen=True)
class PublishedSchedule:
    """A schedule read from a file, with the parameters that the file gives."""

    name: str
    kwargs: dict[str, Any]
    momentum: str | None
    momentum_kwargs: dict[str, Any]
    sha256: str  # of the file
    source: str  # the file, or "hub:USER/NAME@COMMIT"

    @property
    def text(self) -> str:
        momentum = f" with momentum {format_spec(self.momentum, self.momentum_kwargs)}" if self.momentum else ""
        return format_spec(self.name, self.kwargs) + momentum

    @property
    def pin(self) -> str:
        """Source and hash, for the record of a run."""
        return f"{self.source} sha256:{self.sha256}"


def schedule_as_json(schedule: Schedule) -> str:
    """The content of a schedule's file, without derived parameters."""

    def given(kwargs: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in kwargs.items() if value is not None}

    values = (_FORMAT, schedule.name, given(schedule.kwargs), schedule.momentum, given(schedule.momentum_kwargs))
    return json.dumps(dict(zip(_KEYS, values, strict=True)), indent=2, allow_nan=False) + "\n"


def read_schedule_file(path: Path, source: str | None = None) -> PublishedSchedule:
    """Reads the file of a schedule and checks it against the registry; `source` is its name in errors."""
    source = source or str(path)
    try:
        _check_size(path.stat().st_size, source)
        content = path.read_bytes()
        data = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, LabError) else LabError(f"{source}: {FILE} is not valid JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise LabError(f"{source}: {FILE} is not a schedule of this format ({_FORMAT!r}).")
    if unknown := sorted(data.keys() - set(_KEYS)):
        raise LabError(f"{source}: {FILE} holds {unknown[0]!r}, which is not a field of a schedule.")
    name, kwargs = _checked(data.get("lr_scheduler"), data.get("lr_scheduler_kwargs"), SCHEDULERS, source)
    momentum, momentum_kwargs = data.get("momentum_scheduler"), data.get("momentum_scheduler_kwargs")
    if momentum is not None:
        momentum, momentum_kwargs = _checked(momentum, momentum_kwargs, MOMENTUM_SCHEDULERS, source)
    elif momentum_kwargs:
        raise LabError(f"{source}: {FILE} has momentum_scheduler_kwargs without momentum_scheduler.")
    return PublishedSchedule(name, kwargs, momentum, momentum_kwargs or {}, hashlib.sha256(content).hexdigest(), source)


def _check_size(size: int, source: str) -> None:
    if size > _LARGEST:
        raise LabError(f"{source}: {FILE} has {counted(size, 'byte')}, more than the {_LARGEST} of any schedule.")


def _checked(name: Any, kwargs: Any, registry: Any, source: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(name, str) or name.startswith(PREFIX) or not isinstance(kwargs or {}, dict):
        raise LabError(f"{source}: {FILE} must name a {registry.noun} and its parameters, not {name!r} and {kwargs!r}.")
    if PREFIX in json.dumps(kwargs):
        raise LabError(f"{source}: a parameter of {name!r} names a schedule on the Hub, which may change.")
    try:
        registry[name].resolve(kwargs or {})
    except LabError as error:
        raise LabError(f"{source}: {error}") from None
    return registry[name].name, dict(kwargs or {})


@functools.lru_cache(maxsize=64)  # the same schedule within a process, however often a script looks it up
def hub_schedule(spec: str) -> PublishedSchedule:
    """The schedule "hub:USER/NAME" or "hub:USER/NAME@REVISION", from the cache if the Hub cannot be reached."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import validate_repo_id

    repo_id, _, revision = spec.removeprefix(PREFIX).partition("@")
    try:
        validate_repo_id(repo_id)
    except ValueError:
        repo_id = ""
    if repo_id.count("/") != 1:
        raise LabError(f"{spec!r} is not the name of a schedule. Write hub:USER/NAME or hub:USER/NAME@REVISION.")
    limit_waiting()
    try:
        info = HfApi().model_info(repo_id, revision=revision or None, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        if FILE not in sizes:
            raise LabError(f"{spec!r}: the repository has no {FILE}. `lrlab schedule` makes one.")
        _check_size(sizes[FILE], spec)
        path = Path(hf_hub_download(repo_id, FILE, revision=revision or None))  # by revision, so that the cache knows it
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, LabError) and not isinstance(error, HubSilent):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            reason = "There is no such repository or revision for models on the Hub, or your token may not see it."
        else:
            cached = try_to_load_from_cache(repo_id, FILE, revision=revision or None)
            if isinstance(cached, str):
                commit = Path(cached).parent.name
                warn(f"the Hub cannot be reached; {spec!r} is taken from the cache, commit {commit}.")
                return read_schedule_file(Path(cached), f"{PREFIX}{repo_id}@{commit}")
            reason = without_tokens(f"The Hub cannot be reached or refuses: {error}")
        raise LabError(f"{spec!r}: {reason}") from None
    return read_schedule_file(path, f"{PREFIX}{repo_id}@{path.parent.name}")
