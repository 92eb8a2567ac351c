"""Uploads and downloads of runs, studies and toy datasets: each upload is one commit, and nothing downloaded is run."""

from __future__ import annotations

import dataclasses
import glob
import shlex
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, continued_by, warn
from ..core.files import FULL, check_new_folder, new_folder
from ..core.manifest import refuse_damaged, write_manifest
from .contents import Contents, contents_of, is_owned, kind_of_files, kind_of_folder, with_manifest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from ..training.config import ResolvedConfig

_TAKEN = (".json", ".yaml", ".md", ".jsonl", ".tex", ".parquet", ".png", ".gif", ".html", ".safetensors")
_OUT = "Give a new one with --out"


@dataclass(frozen=True)
class Target:
    """A repository of the Hub."""

    repo_id: str  # [`_named`] adds the user to a bare name
    repo_type: str = "model"  # or "dataset"
    private: bool = False  # if it is new
    revision: str = "main"  # a branch, which is created if it is missing
    token: str | None = field(default=None, repr=False)  # that of `HF_TOKEN` or `hf auth login` if not given
    asked_by: str = "lrlab push"  # the command or option that uploads, for messages
    id_option: str = "--repo_id"  # what gave the id, likewise

    @property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi, get_token

        return HfApi(token=self.token or get_token())

    @property
    def where(self) -> dict[str, Any]:
        """Arguments that most calls of the client take."""
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}


@contextmanager
def _hub_errors(target: Target) -> Iterator[None]:
    """Turns errors of the client into a `LabError` with a remedy."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except LabError:
        raise
    # A failed connection is an HTTPError in huggingface_hub 1 and later, an OSError before; the client's checks, such as of
    # a card's metadata, raise ValueErrors, and uploads of large files RuntimeErrors with a cause.
    except (HTTPError, OSError, RuntimeError, ValueError) as raised:
        error = (raised.__cause__ if isinstance(raised, RuntimeError) else None) or raised
        if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
            raise  # of a local file
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = f"check {target.id_option} {target.repo_id!r}, and the rights of the token."
        if (status is None and not isinstance(error, ValueError)) or (status or 0) >= 429:
            remedy = "the Hub cannot be reached or is busy: check the network and HF_ENDPOINT, and try again."
        elif status == 401:
            remedy = "the Hub does not accept the token of --hub_token, HF_TOKEN or `hf auth login`; make a new one."
        raise LabError(f"{target.asked_by}, {target.repo_type} {target.repo_id!r}: {error}\nHint: {remedy}") from None


# --- uploads ---------------------------------------------------------------------------------------------------------


def push_folder(folder: Path, target: Target, message: str | None = None) -> str:
    """
    Uploads the files that users of a run, a study or a toy dataset need, in one commit; returns its URL.

    The type of the repository follows from what the folder holds. Raises a `LabError` before anything is sent if the upload
    cannot work, or, if it fails, with the command that repeats it.
    """
    kind = kind_of_folder(folder)
    if not kind.repo_type:
        raise LabError(f"{str(folder)!r} is a {kind.name}, which is not uploaded. Hint: push the run trained on it.")
    held = refuse_damaged(folder, f"`lrlab check {shlex.quote(str(folder))}` lists the damage and the remedies")
    if held.note:
        warn(f"{str(folder)!r}: {held.note}.")
    if held.is_open:
        raise LabError(f"{str(folder)!r} was being written and is not finished. Hint: give the command that wrote it again.")
    target = dataclasses.replace(target, repo_type=kind.repo_type)
    with _repeatable(folder, target, message):
        target = _named(target)
    contents = with_manifest(contents_of(folder, target.repo_id, target.revision), held.sums)
    with _repeatable(folder, target, message):
        _make_ready(target)
        return _commit(contents, target, message or contents.message)


@contextmanager
def _repeatable(folder: Path, target: Target, message: str | None) -> Iterator[None]:
    """Adds the command that repeats an upload to its errors."""
    try:
        with _hub_errors(target):
            yield
    except LabError as error:
        flags = ["--message", message] if message else []
        flags += ["--private"] * target.private
        flags += ["--revision", target.revision] if target.revision != "main" else []
        again = shlex.join(["lrlab", "push", str(folder), "--repo_id", target.repo_id, *flags])
        token = ", with the token in HF_TOKEN" * (target.token is not None)
        raise LabError(
            f"The upload failed: {error}\nA commit appears whole or not at all. Files already sent are not sent again. "
            f"To go on: `{again}`{token}"
        ) from None


def check_can_push(config: ResolvedConfig) -> str:
    """
    The complete id of the repository. Raises a `LabError`, before training, if the run could not be uploaded; a dry run
    creates nothing.
    """
    target = _named(target_of_training(config))
    if not config.dry_run:
        _make_ready(target)
    return target.repo_id


def target_of_training(config: ResolvedConfig) -> Target:
    """The repository that a run is uploaded to at its end."""
    return Target(
        config.hub_model_id or Path(config.output_dir).resolve().name,
        private=config.hub_private_repo,
        token=config.hub_token,
        asked_by="--push_to_hub",
        id_option="--hub_model_id",
    )


def _named(target: Target) -> Target:
    """The target with a complete id; raises a `LabError` for an invalid token."""
    from huggingface_hub import get_token

    if not (target.token or get_token()):
        raise LabError(f"{target.asked_by} needs a token with write permission. Run `hf auth login`, or set HF_TOKEN.")
    with _hub_errors(target):
        user = target.api.whoami()["name"]
    return target if "/" in target.repo_id else dataclasses.replace(target, repo_id=f"{user}/{target.repo_id}")


def _make_ready(target: Target) -> None:
    """Creates repository and branch if they are missing; raises a `LabError` if nothing can be uploaded to them."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    api = target.api
    with _hub_errors(target):
        api.create_repo(**target.where, private=target.private or None, exist_ok=True)
        # Of a repository that exists. The client's own `auth_check` takes `write` only in newer versions.
        path = f"{api.endpoint}/api/{target.repo_type}s/{target.repo_id}/auth-check/write"
        hf_raise_for_status(get_session().get(path, headers=build_hf_headers(token=api.token)))
        if target.private and not api.repo_info(**target.where).private:
            raise LabError(
                f"{target.id_option} {target.repo_id!r} exists and is public. Make it private in its settings on the "
                "Hub, or leave out the option that asks for a private one."
            )
        if target.revision != "main":
            api.create_branch(**target.where, branch=target.revision, exist_ok=True)


def _commit(contents: Contents, target: Target, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    there = target.api.list_repo_files(**target.where, revision=target.revision)
    kind, own = kind_of_files(there), contents.kind
    if kind is not None and kind != own:  # its card would be replaced
        what = f"holds a {kind.name}, and this is a {own.name}. Give another {target.id_option}."
        raise LabError(f"The repository {target.repo_id!r} {what}")
    stale = [name for name in there if name not in contents.files and is_owned(name, contents)]
    title, _, rest = message.partition("\n")
    with warnings.catch_warnings():
        # The client warns of parquet files in a model repository; here they are evidence.
        warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")
        # Not `upload_folder`, which may make several commits.
        commit = target.api.create_commit(
            **target.where,
            operations=[*(CommitOperationAdd(*file) for file in contents.files.items()), *map(CommitOperationDelete, stale)],
            commit_message=title[:200],
            commit_description=(title[200:] + rest).strip() or None,
            revision=target.revision,
        )
    return str(commit.commit_url)


# --- downloads -------------------------------------------------------------------------------------------------------


def fetch(repo_id: str, folder: Path, revision: str | None = None) -> Path:
    """
    Downloads the repository of a run, a study or a toy dataset into a new or empty folder, whole or not at all.

    Weights are downloaded as safetensors only, without code. Raises a `LabError` for files that differ from their manifest,
    which are then in the client's cache; warns if there is no manifest.
    """
    from huggingface_hub import snapshot_download

    check_new_folder(folder, _OUT)
    target, info = _find(repo_id, revision)
    files = files_to_take(repo_id, [file.rfilename for file in info.siblings or []])
    if kind_of_files(files) is None:
        raise LabError(f"{repo_id!r} holds something else, and not a run, a study or a toy dataset of this package.")
    again = continued_by("pull again: finished downloads are in the client's cache")
    with again, new_folder(folder, _OUT) as temporary, _hub_errors(target):
        patterns = [glob.escape(name) for name in files]
        cached = Path(snapshot_download(**target.where, revision=info.sha, allow_patterns=patterns))
        try:
            note = refuse_damaged(cached, "pull again, or another --revision", only=_is_taken).note
        except LabError as error:
            raise LabError(f"{repo_id!r} has changed since it was uploaded, or is damaged: {error}") from None
        if note:
            warn(f"{repo_id!r}: {note}.")
        for name in files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cached / name, temporary / name)
        write_manifest(temporary)  # of what was downloaded, for `lrlab check`
    return folder


def _find(repo_id: str, revision: str | None) -> tuple[Target, Any]:
    """The repository of this id, of any type."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    for repo_type in ("model", "dataset"):
        target = Target(repo_id, repo_type, asked_by="lrlab pull", id_option="the id")
        with _hub_errors(target), suppress(RepositoryNotFoundError, RevisionNotFoundError):
            return target, target.api.repo_info(**target.where, revision=revision)
    raise LabError(
        f"There is no model and no data set {repo_id!r}{f' at {revision!r}' if revision else ''} on the Hub, or your token "
        "may not see it. Check the id; for a private one run `hf auth login` or set HF_TOKEN."
    )


def files_to_take(repo_id: str, names: list[str]) -> list[str]:
    """The files to download of a repository's files; raises a `LabError` for a path that leaves the folder."""
    for name in names:
        if PurePosixPath(name).is_absolute() or {"..", ""} & {*name.split("/")} or "\\" in name or ":" in name:
            raise LabError(f"{repo_id!r} holds {name!r}, a path that leads out of its folder. Nothing was downloaded.")
    return [name for name in names if _is_taken(name)]


def _is_taken(name: str) -> bool:
    """Whether a file is downloaded: formats that run no code when they are read, without states of training."""
    return PurePosixPath(name).suffix.lower() in _TAKEN and not name.startswith("checkpoint-")
