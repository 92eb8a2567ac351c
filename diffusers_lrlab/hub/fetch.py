"""Downloads of untrusted files from the Hub: names, sizes and formats are checked, and nothing is run."""

import contextlib
import functools
import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from ..core.errors import LabError, continued_by
from ..core.files import check_new_folder, new_folder
from ..core.held import refuse_damaged
from ..core.manifest import MANIFEST, file_sums, write_manifest
from ..core.plain_yaml import load_plain_yaml
from ..core.words import counted
from ..training.record_schema import read_json
from .access import Target, check_repo_id, hub_errors, status_of, with_retries
from .cards import HUB, parsed_card
from .contents import type_of_files
from .pipeline_folder import check_pipeline
from .records import lines_of

# Formats that run code when they are read.
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib", ".h5", ".msgpack")
_CODE = (".py", ".so", ".sh", ".ipynb")
# The endings that are downloaded, and the largest plausible size of each in bytes.
_LARGEST = {
    **{".json": 8 << 20, ".yaml": 1 << 20, ".md": 4 << 20, ".jsonl": 256 << 20, ".tex": 1 << 20},
    **{".parquet": 1 << 30, ".png": 64 << 20, ".gif": 64 << 20, ".html": 256 << 20, ".safetensors": 64 << 30},
}
_IGNORED = (".gitattributes", ".gitignore", "LICENSE")
_MOST_FILES, _LONGEST_NAME = 20_000, 200
_OUT = "Give a new one with --out"


def fetch(repo_id: str, folder: Path, revision: str | None = None, expected: str | None = None) -> Path:
    """
    Downloads a repository of any type, or only of the type `expected`, into a new or empty folder, whole or not at all.

    Weights are downloaded as safetensors only; code beside them is not downloaded, and nothing is run. Raises a `LabError`
    for a file that cannot be trusted.
    """
    check_new_folder(folder, _OUT)
    target, info = _find(repo_id, revision)
    announced = {_checked(repo_id, file).rfilename: file for file in info.siblings or []}
    files = check_files(repo_id, [(name, file.size or 0) for name, file in announced.items()])
    found = type_of_files(files)
    if found is None or (expected is not None and found != expected):
        wanted = f"a {expected}" if expected else "a run, a study, a toy dataset or a schedule of this package"
        raise LabError(f"{repo_id!r} holds {f'a {found}' if found else 'something else'}, and not {wanted}.")
    again = continued_by("pull again: finished downloads are in the client's cache")
    with again, new_folder(folder, _OUT) as temporary, hub_errors(target):
        for name in files:
            _download(target, announced[name], info.sha, temporary / name)
        check_formats(temporary, repo_id)
        _hold(temporary, repo_id, found)
        write_manifest(temporary)  # of what was downloaded, for `lrlab check`
    return folder


def _download(target: Target, announced: Any, revision: str | None, to: Path) -> None:
    """Downloads a file; one that differs from what the Hub announced is downloaded again past the client's cache, once."""
    from huggingface_hub import hf_hub_download

    name, wrong = announced.rfilename, ""
    for past_cache in (False, True):
        how = {"filename": name, "revision": revision, "force_download": past_cache}
        try:
            path = with_retries(functools.partial(hf_hub_download, **target.where, **how), f"Downloading {name}")
        except OSError as error:
            if status_of(error) != 404:
                raise
            wrong = "the Hub lists it but does not have it"
            break
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        if not (wrong := _difference(to, announced)):
            return
    raise LabError(
        f"{target.repo_id!r}: {name!r}: {wrong}. Nothing was kept. Hint: pull again, or another --revision; if this "
        "persists, its owner has to upload the file again."
    )


def _difference(path: Path, announced: Any) -> str:
    """The difference of a file from the size and hash that the Hub announced, in words; an empty string for none."""
    from huggingface_hub.utils.sha import git_hash

    sums = file_sums(path)
    if announced.size is not None and sums["size"] != announced.size:
        return f"it has {counted(sums['size'], 'byte')}, and the Hub announced {announced.size}"
    if announced.lfs is not None:
        return "" if announced.lfs["sha256"] == sums["sha256"] else "its SHA-256 is not the one that the Hub announced"
    is_same = announced.blob_id is None or announced.blob_id == git_hash(path.read_bytes())
    return "" if is_same else "its hash is not the one that the Hub announced"


def _checked(repo_id: str, file: Any) -> Any:
    """The announced file; raises a `LabError` unless its name is a string and its size, if any, a number of bytes."""
    if not isinstance(file.rfilename, str) or not (file.size is None or (type(file.size) is int and file.size >= 0)):
        what = f"{file.rfilename!r} has {file.size!r} bytes"
        raise LabError(f"{repo_id!r}: the Hub says that {what}. Nothing was downloaded. Hint: pull again later.")
    return file


def _hold(folder: Path, repo_id: str, kind: str) -> None:
    """Raises a `LabError` if the files differ from their manifest, if there is one."""
    if not (folder / MANIFEST).exists():
        if kind == "run" and (folder / "model_index.json").exists():
            check_pipeline(folder)
        return
    remedy = f"{repo_id!r} has changed since it was uploaded, or was not listed in full. Pull again, or another --revision."
    refuse_damaged(folder, "download", remedy, only=lambda name: bool(check_files(repo_id, [(name, 0)])))


def _find(repo_id: str, revision: str | None) -> tuple[Target, Any]:
    """The repository of this id, of any type."""
    from huggingface_hub.errors import HTTPError

    check_repo_id(repo_id)
    for repo_type in ("model", "dataset"):
        target = Target(repo_id, repo_type, asked_by="lrlab pull", id_option="the id")
        try:
            look = functools.partial(target.api.repo_info, **target.where, revision=revision, files_metadata=True)
            return target, with_retries(look, "Looking at the repository")
        except (HTTPError, OSError, ValueError) as error:
            if status_of(error) not in (401, 403, 404):
                with hub_errors(target):
                    raise
        except (KeyError, TypeError, AttributeError) as error:  # of the client, for an incomplete answer
            what = f"{type(error).__name__}: {error}"
            raise LabError(
                f"The answer about {repo_id!r} is not from the Hub ({what}). Check the network and HF_ENDPOINT."
            ) from None
    with contextlib.suppress(HTTPError, OSError):
        if target.api.repo_exists(repo_id, repo_type="space"):
            raise LabError(f"{repo_id!r} is a Space, a page to look at: {HUB}/spaces/{repo_id}. Give a model or a data set.")
    raise LabError(
        f"There is no model and no data set {repo_id!r}{f' at {revision!r}' if revision else ''} on the Hub, or your token "
        "may not see it. Check the id; for a private one run `hf auth login` or set HF_TOKEN."
    )


def check_files(repo_id: str, files: list[tuple[str, int]]) -> list[str]:
    """
    The files to download of a repository, from all its files as (path, size in bytes). Raises a `LabError` for a path that
    leaves the folder, formats that run code when they are read, and implausible sizes.
    """

    def refused(what: str) -> LabError:
        return LabError(f"{repo_id!r} holds {what}. Nothing was downloaded.")

    if len(files) > _MOST_FILES:
        raise refused(f"{counted(len(files), 'file')}, more than {_MOST_FILES}")
    taken = []
    for name, size in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name or not path.parts:
            raise refused(f"{name!r}, a path that leads out of its folder")
        ending = path.suffix.lower()
        if path.parts[0].startswith("checkpoint-"):
            continue  # states of training, not results
        if ending in _PICKLED:
            raise refused(f"{name!r}, a format that can run code when it is read. Only safetensors are accepted")
        if ending in _CODE or path.name in _IGNORED or ending not in _LARGEST:
            continue
        if size > _LARGEST[ending]:
            most = _LARGEST[ending] / 2**20
            raise refused(f"{name!r} of {size / 2**20:.0f} MiB, where no more than {most:.0f} are expected")
        if max(map(len, path.parts)) > _LONGEST_NAME:
            raise refused(f"a file whose name has more than {_LONGEST_NAME} characters ({name[:60]!r}...)")
        taken.append(name)
    if clash := {str(parent) for name in taken for parent in PurePosixPath(name).parents} & set(taken):
        raise refused(f"{clash.pop()!r} as a file and as a folder")
    return taken


def check_formats(folder: Path, repo_id: str) -> None:
    """Raises a `LabError` for the first JSON, YAML, parquet or safetensors file that is not in the format of its name."""
    from pyarrow import parquet
    from safetensors import safe_open

    def read(path: Path) -> None:
        if path.suffix == ".json":
            read_json(path)
        elif path.suffix == ".jsonl":
            for line in lines_of(path):
                json.loads(line)
        elif path.suffix == ".yaml":
            load_plain_yaml(path.read_text(encoding="utf-8"))
        elif path.suffix == ".parquet":
            parquet.read_metadata(path)
        elif path.suffix == ".safetensors":
            with safe_open(path, "np"):
                pass
        elif path.name == "README.md":
            parsed_card(path.read_text(encoding="utf-8"), path.name)

    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            read(path)
        except Exception as error:  # of any type: the files may be made to break parsers
            name = path.relative_to(folder).as_posix()
            reason = str(error).replace(str(path), name)
            raise LabError(
                f"{repo_id!r}: {name!r} is damaged or not what its name says ({reason}). Nothing was kept."
            ) from None
