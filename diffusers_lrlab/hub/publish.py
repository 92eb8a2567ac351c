"""Uploads: everything in one commit, checked before and after."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Interrupted, LabError
from ..core.held import refuse_damaged
from ..core.manifest import Sums
from ..core.signals import interrupts_raised
from ..core.words import counted
from .access import Target, check_can_write, hub_errors, status_of, with_retries
from .contents import Contents, contents_of, is_page, matches, type_of_files, type_of_folder, with_manifest
from .pipeline_folder import check_pipeline

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from ..training.config import ResolvedConfig

_CHUNK, _LONGEST_TOKEN = 1 << 20, 1 << 10  # bytes


class Published(NamedTuple):
    """A finished upload: the URL of the commit or pull request, and the number of files."""

    url: str
    num_files: int


class _Stop(KeyboardInterrupt):
    """The number of a signal during an upload; not an `Exception`, which the client would catch."""


class UploadInterrupted(Interrupted):
    """An upload stopped by a signal. A commit appears whole or not at all."""

    def __init__(self, signal_number: int, again: str):
        BaseException.__init__(
            self,
            "Stopped while uploading. The repository is unchanged, or has all of this commit. Files already sent are not "
            f"sent again. To go on: {again}",
        )
        self.signal_number = signal_number


def push_folder(folder: Path, target: Target, message: str | None = None, **options: bool) -> Published:
    """
    Uploads the folder of a run, a study, a toy dataset or a schedule: the files that its users need.

    The type of the repository follows from what the folder holds; `options` are those of [`contents_of`]. Raises a
    `LabError` before anything is sent if the upload cannot work, or, if it fails, with the command that resumes it.
    """
    sums = {} if is_page(folder) else _refuse_damaged(folder, options.get("unfinished", False))  # a page has no manifest
    contents = contents_of(folder, target.repo_id, target.revision, **options)
    target = check_can_write(dataclasses.replace(target, repo_type=contents.repo_type))
    # Again, since the card names the complete id.
    contents = with_manifest(contents_of(folder, target.repo_id, target.revision, **options), sums)
    return publish(contents, target, message or contents.message, _push_command(folder, target, options, message))


def _refuse_damaged(folder: Path, unfinished: bool = False) -> dict[str, Sums]:
    """The sums of the files of a folder; raises a `LabError` for damaged ones."""
    remedy = f"`lrlab check {shlex.quote(str(folder))}` lists the damage and the remedies. Nothing was sent."
    kind = type_of_folder(folder)
    held = refuse_damaged(folder, kind, remedy)
    if held.is_open and not unfinished:
        raise LabError(f"{str(folder)!r} was being written and is not finished. Hint: give the command that wrote it again.")
    if kind == "run" and (folder / "model_index.json").exists():  # without it, [`contents_of`] raises
        check_pipeline(folder)
    return held.sums


def _push_command(folder: Path, target: Target, options: dict[str, bool], message: str | None = None) -> str:
    given = {**options, "create_pr": target.create_pr, "private": target.private}
    flags = [f"--{name}" for name, value in given.items() if value]
    flags += ["--message", message] if message else []
    flags += ["--revision", target.revision] if target.revision != "main" else []
    return f"`{shlex.join(['lrlab', 'push', str(folder), '--repo_id', target.repo_id, *flags])}`"


def publish(contents: Contents, target: Target, message: str, again: str) -> Published:
    """
    Uploads in one commit, with retries, and checks that the repository has what was sent; after [`check_can_write`].

    The first line of `message` is the title of the commit; `again` is the command that repeats the upload, for errors.
    """
    _refuse_secrets(contents, target, message)
    if target.token:
        again += ", with the token in HF_TOKEN"
    try:
        with interrupts_raised(_Stop), hub_errors(target):
            return _Upload(contents, target, message).done()
    except _Stop as stop:
        raise UploadInterrupted(stop.args[0], again) from None
    except LabError as error:
        raise LabError(
            f"The upload failed: {error}\nA commit appears whole or not at all. Files already sent are not sent again. "
            f"To go on: {again}"
        ) from None


def _refuse_secrets(contents: Contents, target: Target, message: str) -> None:
    """Raises a `LabError` if the files or the message hold a token, in use or not."""
    from huggingface_hub import get_token

    secrets = [secret.encode() for secret in (target.token, get_token()) if secret]

    def has_token(data: bytes) -> bool:
        return any(secret in data for secret in secrets) or re.search(rb"hf_[A-Za-z0-9]{30,}", data) is not None

    if has_token(message.encode()):
        raise LabError("The message of the commit holds a token, so nothing was sent. Take it out, and push again.")
    for name, content in contents.files.items():
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
            end = b""
            while part := file.read(_CHUNK):
                if has_token(end + part):
                    raise LabError(f"{name!r} holds a token, so nothing was sent. Take it out, and push again.")
                end = part[-_LONGEST_TOKEN:]


class _Upload:
    def __init__(self, contents: Contents, target: Target, message: str):
        self.contents, self.target, self.api = contents, target, target.api
        title, _, rest = message.partition("\n")
        self.title, self.description = title[:200], (title[200:] + rest).strip() or None
        self.sent: dict[str, CommitOperationAdd] = {}

    def done(self) -> Published:
        from huggingface_hub.errors import HfHubHTTPError

        head = with_retries(self._head, "Looking at the repository")
        before = with_retries(lambda: self._tree(head), "Looking at the repository")
        self._check_type(before)

        def attempt() -> Any:
            if self.sent and (self._was_proposed() if self.target.create_pr else self._was_made(head)):
                return None  # the commit was made, the answer lost
            try:
                return self._commit(head, before)
            except HfHubHTTPError as error:
                # The conflict may be with an earlier attempt, whose commit appeared late.
                if status_of(error) == 412 and not self.target.create_pr and self._was_made(head):
                    return None
                raise

        commit: Any = with_retries(attempt, f"Uploading {counted(len(self.contents.files), 'file')}")
        if commit is None and self.target.create_pr:
            return Published(self.target.repo_id, len(self.sent))
        revision = self._head() if commit is None else (commit.pr_revision or commit.oid)
        if wrong := self._missing(revision):
            names = ", ".join(wrong[:5])
            raise LabError(f"{names} of the repository {self.target.repo_id!r} at {revision} are not what was sent.")
        url = getattr(commit, "pr_url", None) or getattr(commit, "commit_url", None)
        return Published(str(url or self.target.repo_id), len(self.sent))

    def _check_type(self, before: dict[str, Any]) -> None:
        """Raises a `LabError` if the repository holds another type of result, whose card would be replaced."""
        there, ours = type_of_files(before), self.contents.type
        if there not in (None, ours) and self.target.repo_type != "space":
            what = f"The repository {self.target.repo_id!r} holds a {there}, and this is a {ours}."
            raise LabError(f"{what} Give another {self.target.id_option}.")

    def _was_made(self, head: str) -> bool:
        now = self._head()
        return now != head and not self._missing(now)

    def _was_proposed(self) -> bool:
        """Whether a pull request with this title is open already."""
        found = self.api.get_repo_discussions(**self.target.where)
        return any(each.is_pull_request and each.status == "open" and each.title == self.title for each in found)

    def _head(self) -> str:
        return str(self.api.repo_info(**self.target.where, revision=self.target.revision).sha)

    def _tree(self, revision: str) -> dict[str, Any]:
        entries = self.api.list_repo_tree(**self.target.where, revision=revision, recursive=True)
        return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}

    def _commit(self, head: str, before: dict[str, Any]) -> Any:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self.sent = {name: CommitOperationAdd(name, content) for name, content in self.contents.files.items()}
        ours = [name for name in before if matches(name, self.contents.owned) and not name.endswith(".py")]
        stale = [name for name in ours if name not in self.sent]
        with warnings.catch_warnings():
            # The client warns of parquet files in a model repository; here they are evidence.
            warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")
            return self.api.create_commit(
                **self.target.where,
                operations=[*self.sent.values(), *map(CommitOperationDelete, stale)],
                commit_message=self.title,
                commit_description=self.description,
                revision=self.target.revision,
                parent_commit=head,  # refuses one of two simultaneous pushes
                create_pr=self.target.create_pr or None,
            )

    def _missing(self, revision: str) -> list[str]:
        """Sent files that are missing from the repository or differ there."""
        there = with_retries(lambda: self._tree(revision), "Checking what is there")
        return [name for name, operation in self.sent.items() if not _is_same(there.get(name), operation)]


def _is_same(entry: Any, operation: CommitOperationAdd) -> bool:
    from huggingface_hub.utils.sha import git_hash

    if entry is None or entry.size != operation.upload_info.size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == operation.upload_info.sha256.hex()
    with operation.as_file() as file:
        return entry.blob_id == git_hash(file.read())


# --- the training script ---------------------------------------------------------------------------------------------


def training_target(config: ResolvedConfig) -> Target:
    return Target(
        config.hub_model_id or Path(config.output_dir).resolve().name,
        private=config.hub_private_repo,
        token=config.hub_token,
        asked_by="--push_to_hub",
        id_option="--hub_model_id",
    )


def check_can_push(config: ResolvedConfig) -> str:
    """[`check_can_write`] before training, and a check of the license; returns the complete id of the repository."""
    target = check_can_write(training_target(config), config.dry_run)
    if config.hub_license is not None:
        from huggingface_hub import ModelCard

        with hub_errors(target):  # before training, not with the card after it
            card = ModelCard(f"---\nlicense: {json.dumps(config.hub_license)}\n---\n")
            with_retries(card.validate, "Checking --hub_license")
    return target.repo_id


def push_run(folder: Path, config: ResolvedConfig) -> Published:
    """Uploads pipeline, card and evidence of a finished run, after [`check_can_push`]."""
    target = training_target(config)
    contents = with_manifest(contents_of(folder, target.repo_id), _refuse_damaged(folder))
    return publish(contents, target, contents.message, _push_command(folder, target, {}))
