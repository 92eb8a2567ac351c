"""Uploads: a whole result in one commit."""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError
from ..core.held import refuse_damaged
from ..core.manifest import Sums
from .access import Target, hub_errors, make_ready, named
from .contents import Contents, contents_of, is_owned, type_of_files, type_of_folder, with_manifest
from .pipeline_folder import check_pipeline

if TYPE_CHECKING:
    from ..training.config import ResolvedConfig


def push_folder(folder: Path, target: Target, message: str | None = None, unfinished: bool = False) -> str:
    """
    Uploads the files that users of a run, a study or a toy dataset need; returns the URL of the commit or pull request.

    The type of the repository follows from what the folder holds; `unfinished` accepts an unfinished run. Raises a
    `LabError` before anything is sent if the upload cannot work, or, if it fails, with the command that repeats it.
    """
    sums = _refuse_damaged(folder, unfinished)
    target = named(dataclasses.replace(target, repo_type="model" if type_of_folder(folder) == "run" else "dataset"))
    contents = with_manifest(contents_of(folder, target.repo_id, target.revision, unfinished), sums)
    make_ready(target)
    flags = ["--unfinished"] * unfinished + (["--message", message] if message else [])
    return _publish(folder, contents, target, message or contents.message, flags)


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


def _publish(folder: Path, contents: Contents, target: Target, message: str, flags: list[str]) -> str:
    """Uploads in one commit, and returns its URL; errors have the command that repeats it, with these `flags`."""
    flags = flags + ["--create_pr"] * target.create_pr + ["--private"] * target.private
    flags += ["--revision", target.revision] if target.revision != "main" else []
    again = shlex.join(["lrlab", "push", str(folder), "--repo_id", target.repo_id, *flags])
    try:
        with hub_errors(target):
            return _commit(contents, target, message)
    except LabError as error:
        token = ", with the token in HF_TOKEN" * (target.token is not None)
        raise LabError(
            f"The upload failed: {error}\nA commit appears whole or not at all. Files already sent are not sent again. "
            f"To go on: `{again}`{token}"
        ) from None


def _commit(contents: Contents, target: Target, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    there = target.api.list_repo_files(**target.where, revision=target.revision)
    if (kind := type_of_files(there)) not in (None, contents.type):  # its card would be replaced
        what = f"holds a {kind}, and this is a {contents.type}. Give another {target.id_option}."
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
            create_pr=target.create_pr,
        )
    return str(commit.pr_url or commit.commit_url)


def _target_of_training(config: ResolvedConfig) -> Target:
    return Target(
        config.hub_model_id or Path(config.output_dir).resolve().name,
        private=config.hub_private_repo,
        token=config.hub_token,
        asked_by="--push_to_hub",
        id_option="--hub_model_id",
    )


def check_can_push(config: ResolvedConfig) -> str:
    """
    The complete id of the repository. Raises a `LabError`, before training, if the run could not be uploaded; a dry run
    creates nothing.
    """
    target = named(_target_of_training(config))
    if not config.dry_run:
        make_ready(target)
    return target.repo_id


def push_run(folder: Path, config: ResolvedConfig) -> str:
    """Uploads pipeline, card and evidence of a finished run, after [`check_can_push`]."""
    target = _target_of_training(config)
    contents = with_manifest(contents_of(folder, target.repo_id), _refuse_damaged(folder))
    return _publish(folder, contents, target, contents.message, [])
