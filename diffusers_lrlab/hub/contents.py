"""The kinds of folder that this package writes: how each is recognised, and which files are uploaded with which card."""

import fnmatch
import re
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.manifest import MANIFEST, Sums, file_sums, manifest_text, read_manifest, sums_of_bytes
from ..core.words import counted
from ..data.latents import LATENTS_FILE
from ..training.kinds import components
from ..training.record_schema import read_json
from ..training.run_folder import RECORD, parts_of_pipeline
from .records import read_record

_NEVER = ("*.npy", ".tmp-*", "*/.tmp-*", "*/.cache/*", ".lock*")


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder."""

    name: str
    marker: str  # a file, or a pattern of files, that only this kind has
    repo_type: str = ""  # on the Hub; empty for a kind that is not uploaded
    files: tuple[str, ...] = ()  # patterns of the files to upload, without a slash of files at the top only
    remedy: str = "make it again, or pull it again"  # for damaged files
    example: str = ""  # what to do with a downloaded one


_LATENTS = FolderKind("set of latents", LATENTS_FILE, remedy="remove the folder and encode the images again")
_RUN = FolderKind(
    "run",
    RECORD,
    "model",
    # Checkpoints hold optimizer and random states, logs are the tracker's: neither is part of the result.
    ("model_index.json", "pipeline.py", "README.md", "lrlab/*"),
    "repeat the command that made it, with {option}; pull a downloaded run again",
    "lrlab check {folder}; the command that trains it again is in {folder}/README.md",
)
_STUDY = FolderKind(
    "study",
    "spec.yaml",
    "dataset",
    ("README.md", "*.png", "tables/*.tex", "summary.json", "summary.parquet", "runs.parquet", "spec.yaml", "runs/*.json"),
    "repeat the `lrlab study run` command that made it, which repeats damaged runs; pull a downloaded study again",
    "lrlab study run {folder}/spec.yaml --out NEW",
)
_DATASET = FolderKind(
    "dataset",
    "data/*.parquet",
    "dataset",
    ("README.md", "points.png", "images.png", "data/*.parquet"),
    example="lrlab train --dataset_name {folder}",
)
KINDS = {kind.name: kind for kind in (_LATENTS, _RUN, _STUDY, _DATASET)}


@dataclass(frozen=True)
class Contents:
    """Files to upload."""

    kind: FolderKind
    files: Mapping[str, Path | bytes]  # by path in the repository: a local file, or its content
    owned: tuple[str, ...]  # patterns of files deleted from the repository unless they are among `files`
    message: str  # of the commit


def kind_of_folder(folder: Path) -> FolderKind:
    """The kind of a folder; raises a `LabError` for any other."""
    for kind in KINDS.values():
        if next(folder.glob(kind.marker), None) is not None:
            return kind
    with suppress(LabError):  # the marker file may be lost
        if found := kind_of_files(read_manifest(folder) or ()):
            return found
    raise LabError(
        f"{str(folder)!r} is not the folder of a run (lrlab/run.json), a study (spec.yaml) or an exported dataset "
        "(data/*.parquet). Give a folder that a command of this package wrote."
    )


def kind_of_files(names: Collection[str]) -> FolderKind | None:
    """The kind of a repository with these files, if this package made it."""
    return next((kind for kind in KINDS.values() if kind.repo_type and fnmatch.filter(names, kind.marker)), None)


def contents_of(folder: Path, repo_id: str, revision: str = "main") -> Contents:
    """The files to upload from a folder, with a card that loads from the branch `revision` of the repository."""
    kind = kind_of_folder(folder)
    patterns, message = kind.files, f"The dataset {folder.resolve().name}"
    if kind == _RUN:
        # The components of all kinds of data, as a run on another kind may be in the repository.
        patterns += tuple(f"{part}/*" for part in {*parts_of_pipeline(folder), *components()})
        message = _check_run(folder)
    elif kind == _STUDY:
        message = _check_study(folder)
    if kind == _STUDY and (folder / "runs").is_dir():  # else the folder is the card of a study already
        from ..study.report.report import write_study_card

        with tempfile.TemporaryDirectory() as temporary:
            card = write_study_card(folder, Path(temporary) / "card").parent
            files: dict[str, Path | bytes] = {name: path.read_bytes() for name, path in _files(card, patterns).items()}
            files = {**_files(folder, ("runs/*.json",)), **files, "README.md": located_card(card, repo_id, revision)}
    else:
        files = {**_files(folder, patterns), "README.md": located_card(folder, repo_id, revision)}
    return Contents(kind, files, patterns, message)


def _check_run(folder: Path) -> str:
    """The message for a run; raises a `LabError` if it is not finished."""
    run, train = (read_record(folder)[part] for part in ("run", "train"))
    if run["status"] != "finished":
        raise LabError(
            f"The run in {str(folder)!r} is not finished (status: {run['status']}). Continue it with "
            "--resume_from_checkpoint latest."
        )
    if not (folder / "model_index.json").is_file():
        raise LabError(f"{str(folder)!r} holds no pipeline (model_index.json). Restore it, or repeat the run.")
    return f"{counted(train['num_updates'], 'update')}: {run['command']}"


def _check_study(folder: Path) -> str:
    """The message for a study; raises a `LabError` if it has no summary."""
    summary = folder / "summary.json"
    if not summary.exists():
        raise LabError(f"{str(folder)!r} has no summary yet. Finish the study with `lrlab study run`, then push it.")
    try:
        return f"The study: {read_json(summary)['study']['title']}"
    except (KeyError, TypeError):
        raise LabError(f"{str(summary)!r} is not the summary of a study.") from None


def with_manifest(contents: Contents, known: Mapping[str, Sums]) -> Contents:
    """The contents with their manifest; files whose sums are `known` are not read again."""
    sums = {}
    for name, content in contents.files.items():
        if isinstance(content, bytes):
            sums[name] = sums_of_bytes(content)
        elif name != MANIFEST:
            sums[name] = known.get(name) or file_sums(content)
    return replace(contents, files={**contents.files, MANIFEST: manifest_text(sums).encode()})


def is_owned(name: str, contents: Contents) -> bool:
    """Whether an upload replaces a file of the repository. Code, which a download leaves on the Hub, is kept."""
    return _matches(name, contents.owned) and not name.endswith(".py")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern; patterns without a slash match top-level files only."""
    return any(fnmatch.fnmatchcase(name, each) and ("/" in each or "/" not in name) for each in patterns)


def _files(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    """Files by relative path; raises a `LabError` for links to files outside the folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        never = any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEVER)
        if never or not path.is_file() or not _matches(name, patterns):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LabError(f"{str(path)!r} is a link to a file outside of {str(folder)!r}. Put a copy in its place.")
        found[name] = path
    return found


# --- cards -----------------------------------------------------------------------------------------------------------


def parsed_card(text: str, name: str) -> Any:
    """A `huggingface_hub.ModelCard`; raises a `LabError` for metadata that cannot be read."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text)
    except Exception as error:  # of any type, from the YAML parser
        raise LabError(f"The metadata of {name!r} cannot be read: {error}") from None


def located_card(folder: Path, repo_id: str, revision: str) -> bytes:
    """The card of a folder, with examples that load from this branch of the repository, and there the source of results."""
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{str(path)!r} cannot be read ({error}); results are uploaded with their cards only.") from None
    branch = "" if revision == "main" else f', revision="{revision}"'
    loading = r'((?:Pipeline\.from_pretrained|\bload_dataset)\(\s*)"[^"\n]*"(, revision="[^"\n]*")?'
    text = re.sub(loading, rf'\1"{repo_id}"{branch}', text)
    card = parsed_card(re.sub(r'(custom_pipeline=)"[^"\n]*"', rf'\1"{repo_id}"', text), str(path))
    for result in card.data.eval_results or []:
        result.source_name, result.source_url = RECORD, f"https://huggingface.co/{repo_id}/blob/{revision}/{RECORD}"
    return str(card).encode()
