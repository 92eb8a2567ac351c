"""Downloads from the Hub: safetensors, tables, texts and pictures, checked against their manifest. Nothing is run."""

from __future__ import annotations

import glob
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.errors import LabError, continued_by, warn
from ..core.files import check_new_folder, new_folder
from ..core.manifest import MANIFEST, refuse_damaged, write_manifest
from .access import Target, hub_errors
from .contents import type_of_files
from .pipeline_folder import check_pipeline
from .records import read_record

# Formats that run code when they are read.
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".h5", ".msgpack")
_TAKEN = (".json", ".yaml", ".md", ".jsonl", ".tex", ".parquet", ".png", ".html", ".safetensors")
_OUT = "--out"


def fetch(repo_id: str, folder: Path, revision: str | None = None) -> Path:
    """
    Downloads the repository of a run, a study or a toy dataset into a new or empty folder, whole or not at all.

    Weights are downloaded as safetensors only, without code. Raises a `LabError` for files that differ from their manifest.
    """
    from huggingface_hub import snapshot_download

    check_new_folder(folder, _OUT)
    target, info = _find(repo_id, revision)
    files = files_to_take(repo_id, [file.rfilename for file in info.siblings or []])
    if (kind := type_of_files(files)) is None:
        raise LabError(f"{repo_id!r} holds something else, and not a run, a study or a toy dataset of this package.")
    again = continued_by("pull again: finished downloads are in the client's cache")
    with again, new_folder(folder, _OUT) as temporary, hub_errors(target):
        patterns = [glob.escape(name) for name in files]
        cached = Path(snapshot_download(**target.where, revision=info.sha, allow_patterns=patterns))
        for name in files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached / name, temporary / name)
        try:
            if (temporary / MANIFEST).exists():
                if note := refuse_damaged(temporary, "pull again, or another --revision", only=_is_taken).note:
                    warn(f"{note}.".replace(f"{temporary}/", ""))
            elif kind == "run":
                read_record(temporary)
                check_pipeline(temporary)
        except LabError as error:
            what = f"{repo_id!r} has changed since it was uploaded, or is damaged: {error}"
            raise LabError(what.replace(f"{temporary}/", "")) from None
        write_manifest(temporary)  # of what was downloaded, for `lrlab check`
    return folder


def _find(repo_id: str, revision: str | None) -> tuple[Target, Any]:
    """The repository of this id, of any type."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    for repo_type in ("model", "dataset"):
        target = Target(repo_id, repo_type, asked_by="lrlab pull", id_option="the id")
        with hub_errors(target), suppress(RepositoryNotFoundError, RevisionNotFoundError):
            return target, target.api.repo_info(**target.where, revision=revision)
    raise LabError(
        f"There is no model and no data set {repo_id!r}{f' at {revision!r}' if revision else ''} on the Hub, or your token "
        "may not see it. Check the id; for a private one run `hf auth login` or set HF_TOKEN."
    )


def files_to_take(repo_id: str, names: list[str]) -> list[str]:
    """
    The files to download of a repository's files. Raises a `LabError` for a path that leaves the folder, and for formats
    that run code when they are read.
    """
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or not path.parts:
            raise LabError(f"{repo_id!r} holds {name!r}, a path that leads out of its folder. Nothing was downloaded.")
        if path.suffix.lower() in _PICKLED and not _is_state(path):
            raise LabError(
                f"{repo_id!r} holds {name!r}, a format that can run code when it is read. Only safetensors are accepted. "
                "Nothing was downloaded."
            )
    return [name for name in names if _is_taken(name)]


def _is_taken(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _TAKEN and not _is_state(PurePosixPath(name))


def _is_state(path: PurePosixPath) -> bool:
    """Whether a file is part of a checkpoint: a state of training, not a result."""
    return path.parts[0].startswith("checkpoint-")
