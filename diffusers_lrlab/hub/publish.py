"""The one place that uploads: all of it in one commit, checked before and after."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Interrupted, LabError
from ..interruption import interrupts_raised
from .access import Target, check_can_write, hub_errors, patiently
from .contents import Contents, contents_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from ..training.config import TrainingConfig

_TEXTS = (".json", ".jsonl", ".md", ".yaml", ".html", ".py", ".tex")


class Published(NamedTuple):
    """What was uploaded: the address of the commit (or of the pull request), its revision, and the number of files."""

    url: str
    revision: str
    num_files: int


class UploadInterrupted(Interrupted):
    """An upload that was stopped by a signal. Nothing half is visible: a commit is there whole or not at all."""

    def __init__(self, signal_number: int, again: str):
        Exception.__init__(
            self,
            "Stopped while uploading. The repository is as it was, or has all of this commit: nothing half is there. Files "
            f"that were sent are not sent again. To go on: {again}",
        )
        self.signal_number = signal_number


def push_folder(folder: Path, target: Target, message: str | None = None, **options: bool) -> Published:
    """
    Uploads what a user needs of the folder of a run, a study, a set of points or a schedule.

    Args:
        folder (`Path`): What to upload.
        target ([`Target`]): Where to; its type is that of what the folder holds.
        message (`str`, *optional*): Of the commit; by default it names the command.
        **options: `space`, `include_checkpoints`, `unfinished`; see [`contents_of`].

    Raises:
        LabError: before anything is sent if it cannot work, and if it fails; then with the command that goes on.
        UploadInterrupted: after SIGINT or SIGTERM.
    """
    with contents_of(folder, target.repo_id, **options) as contents:
        target = check_can_write(dataclasses.replace(target, repo_type=contents.repo_type))
    # Once more, since the card names the complete id.
    with contents_of(folder, target.repo_id, **options) as contents:
        return publish(contents, target, message or contents.message, _push_command(folder, target, options))


def _push_command(folder: Path, target: Target, options: dict[str, bool]) -> str:
    """The command that repeats a push."""
    flags = [f"--{name}" for name, value in options.items() if value]
    flags += ["--create_pr"] if target.create_pr else []
    flags += ["--private"] if target.private else []
    flags += ["--revision", target.revision] if target.revision != "main" else []
    return f"`{shlex.join(['lrlab', 'push', str(folder), '--repo_id', target.repo_id, *flags])}`"


def publish(contents: Contents, target: Target, message: str, again: str) -> Published:
    """
    Uploads in one commit, patiently, and makes sure that what is there is what was sent.

    Args:
        contents ([`Contents`]): What.
        target ([`Target`]): Where, after [`check_can_write`].
        message (`str`): Of the commit; its first line is the title.
        again (`str`): The command that repeats it, for messages.

    Raises:
        LabError: if it fails; it tells what is up, what is not, and how to go on.
        UploadInterrupted: after SIGINT or SIGTERM.
    """
    _refuse_secrets(contents, target)
    with interrupts_raised(lambda number: UploadInterrupted(number, again)):
        try:
            with hub_errors(target):
                return _Upload(contents, target, message).done()
        except LabError as error:
            raise LabError(
                f"The upload failed: {error}\nNothing half is there: a commit appears whole or not at all. Files that were "
                f"sent are not sent again. To go on: {again}"
            ) from None


def _refuse_secrets(contents: Contents, target: Target) -> None:
    """Raises a `LabError` if a text that goes up holds the token."""
    from huggingface_hub import get_token

    secrets = [secret.encode() for secret in (target.token, get_token()) if secret]
    for name, content in contents.files.items():
        if name.endswith(_TEXTS):
            text = content if isinstance(content, bytes) else content.read_bytes()
            if any(secret in text for secret in secrets):
                raise LabError(f"{name!r} holds your token, so nothing was sent. Take it out, and push again.")


class _Upload:
    """One commit, and what the repository was before it."""

    def __init__(self, contents: Contents, target: Target, message: str):
        self.contents, self.target, self.api = contents, target, target.api
        title, _, rest = message.partition("\n")
        self.title, self.description = title[:200], (title[200:] + rest).strip() or None
        self.sent: dict[str, CommitOperationAdd] = {}

    def done(self) -> Published:
        head = patiently(self._head, "Looking at the repository")
        before = patiently(lambda: self._tree(head), "Looking at the repository")
        commit: Any = None

        def attempt() -> Any:
            nonlocal head
            now = self._head()
            if now != head and self.sent and not self._missing(now):
                # The commit was made, only its answer was lost.
                return None
            return self._commit(head, before)

        commit = patiently(attempt, f"Uploading {len(self.contents.files)} files")
        revision = self._head() if commit is None else (commit.pr_revision or commit.oid)
        if wrong := self._missing(revision):
            raise LabError(
                f"{', '.join(wrong[:5])} of the repository {self.target.repo_id!r} at {revision} are not what was sent."
            )
        url = getattr(commit, "pr_url", None) or getattr(commit, "commit_url", None)
        return Published(str(url or self.target.repo_id), revision, len(self.sent))

    def _head(self) -> str:
        return str(self.api.repo_info(**self.target.where, revision=self.target.revision).sha)

    def _tree(self, revision: str) -> dict[str, Any]:
        entries = self.api.list_repo_tree(**self.target.where, revision=revision, recursive=True)
        return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}

    def _commit(self, head: str, before: dict[str, Any]) -> Any:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self.sent = {name: CommitOperationAdd(name, content) for name, content in self.contents.files.items()}
        stale = [
            name
            for name in before
            if name not in self.sent and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.contents.owned)
        ]
        with warnings.catch_warnings():
            # The client takes parquet beside a model for a mistake; here it is part of the evidence.
            warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")
            return self.api.create_commit(
                **self.target.where,
                operations=[*self.sent.values(), *map(CommitOperationDelete, stale)],
                commit_message=self.title,
                commit_description=self.description,
                revision=self.target.revision,
                parent_commit=head,  # of two pushes at once, one is refused instead of mixed with the other
                create_pr=self.target.create_pr or None,
            )

    def _missing(self, revision: str) -> list[str]:
        """Files that are not there as they were sent."""
        there = patiently(lambda: self._tree(revision), "Checking what is there")
        return [name for name, operation in self.sent.items() if not _is_same(there.get(name), operation)]


def _is_same(entry: Any, operation: CommitOperationAdd) -> bool:
    """Whether a file of the repository has the content of an operation."""
    if entry is None or entry.size != operation.upload_info.size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == operation.upload_info.sha256.hex()
    with operation.as_file() as file:
        content = file.read()
    return entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# --- the training script ---------------------------------------------------------------------------------------------


def training_target(config: TrainingConfig) -> Target:
    """Where a run of the training script goes."""
    return Target(
        config.hub_model_id or Path(config.output_dir).resolve().name,
        private=config.hub_private_repo,
        token=config.hub_token,
        asked_by="--push_to_hub",
        id_option="--hub_model_id",
    )


def check_can_push(config: TrainingConfig) -> None:
    """
    Makes sure, before training, that the result can be uploaded: creates the repository, unless this is a dry run, and
    completes `config.hub_model_id`.

    Raises:
        LabError: as [`check_can_write`].
    """
    config.hub_model_id = check_can_write(training_target(config), config.dry_run).repo_id


def push_run(folder: Path, config: TrainingConfig, message: str | None = None) -> Published:
    """
    Uploads pipeline, card and evidence of a finished run.

    Args:
        folder (`Path`): Of the run.
        config ([`TrainingConfig`]): After [`check_can_push`].
        message (`str`, *optional*): Of the commit; by default it names the command.

    Raises:
        LabError: if the upload fails; with the command that repeats it.
    """
    target = training_target(config)
    with contents_of(folder, target.repo_id) as contents:
        return publish(contents, target, message or contents.message, _push_command(folder, target, {}))
