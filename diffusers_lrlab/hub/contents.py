"""The files to upload of a run, a study or an exported dataset, with their card."""

import dataclasses
import fnmatch
import re
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.manifest import MANIFEST, Sums, file_sums, manifest_text, read_manifest, sums_of_bytes
from ..core.words import counted
from ..data.latents import is_latents_folder
from ..training.kinds import components
from ..training.record_schema import read_json
from ..training.run_folder import parts_of_pipeline
from .records import read_record, updates_done

# Checkpoints hold optimizer and random states, logs are the tracker's: neither is part of the result.
_RUN_FILES = ("model_index.json", "pipeline.py", "README.md", "lrlab/*")
_NEVER = ("*.npy", ".tmp-*", "*/.tmp-*", "*/.cache/*", ".lock*")
_STUDY_FILES = (
    *("README.md", "*.png", "tables/*.tex", "summary.json", "summary.parquet", "runs.parquet", "spec.yaml", "runs/*.json"),
)
_DATASET_FILES = ("README.md", "points.png", "images.png", "data/*.parquet")
_MARKERS = {"run": "lrlab/run.json", "study": "spec.yaml", "dataset": "data/*.parquet"}


@dataclass(frozen=True)
class Contents:
    """Files to upload."""

    type: str  # a key of `_MARKERS`
    files: Mapping[str, Path | bytes]  # by path in the repository: a local file, or its content
    owned: tuple[str, ...]  # patterns of files deleted from the repository unless they are among `files`
    message: str  # of the commit


def type_of_folder(folder: Path) -> str:
    """The type of a folder: "run", "study" or "dataset"; raises a `LabError` for any other."""
    if not folder.is_dir():
        raise LabError(f"{str(folder)!r} is not a folder. Give the folder of a run, a study or an exported dataset.")
    if is_latents_folder(folder):
        raise LabError(
            f"{str(folder)!r} holds latents, which are not uploaded. Hint: push the run that was trained on them."
        )
    for what, marker in _MARKERS.items():
        if next(folder.glob(marker), None) is not None:
            return what
    with suppress(LabError):  # the marker file may be lost
        if found := type_of_files(read_manifest(folder) or ()):
            return found
    raise LabError(
        f"{str(folder)!r} holds no run (lrlab/run.json), study (spec.yaml) or exported dataset (data/*.parquet). Give the "
        "folder that a command of this package wrote."
    )


def type_of_files(names: Collection[str]) -> str | None:
    """The type of a repository with these files, if this package made it."""
    return next((what for what, marker in _MARKERS.items() if fnmatch.filter(names, marker)), None)


def contents_of(folder: Path, repo_id: str, revision: str = "main", unfinished: bool = False) -> Contents:
    """
    The files to upload from the folder of a run, a study or an exported dataset. The card loads from the branch `revision`
    of the repository; `unfinished` accepts an unfinished run.
    """
    holds = type_of_folder(folder)
    if holds == "run":
        return _run(folder, repo_id, revision, unfinished)
    if unfinished:
        raise LabError(f"--unfinished is for runs, and {str(folder)!r} holds a {holds}. Leave it out.")
    if holds == "study":
        return _study(folder, repo_id, revision)
    files = _files(folder, _DATASET_FILES) | {"README.md": located_card(folder, repo_id, revision)}
    return Contents(holds, files, _DATASET_FILES, f"The dataset {folder.resolve().name}")


def with_manifest(contents: Contents, known: Mapping[str, Sums]) -> Contents:
    """The contents with their manifest; files whose sums are `known` are not read again."""
    sums = {}
    for name, content in contents.files.items():
        if isinstance(content, bytes):
            sums[name] = sums_of_bytes(content)
        elif name != MANIFEST:
            sums[name] = known.get(name) or file_sums(content)
    return dataclasses.replace(contents, files={**contents.files, MANIFEST: manifest_text(sums).encode()})


def is_owned(name: str, contents: Contents) -> bool:
    """Whether an upload replaces a file of the repository. Code, which a download leaves on the Hub, is kept."""
    return _matches(name, contents.owned) and not name.endswith(".py")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern; patterns without a slash match top-level files only."""
    return any(fnmatch.fnmatchcase(name, each) and ("/" in each or "/" not in name) for each in patterns)


def _files(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path | bytes]:
    """Files by relative path; raises a `LabError` for links to files outside the folder."""
    found: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        never = any(fnmatch.fnmatchcase(name, pattern) for pattern in _NEVER)
        if never or not path.is_file() or not _matches(name, patterns):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LabError(f"{str(path)!r} is a link to a file outside of {str(folder)!r}. Put a copy in its place.")
        found[name] = path
    return found


def _run(folder: Path, repo_id: str, revision: str, unfinished: bool) -> Contents:
    record = read_record(folder)
    status, command = record["run"]["status"], record["run"]["command"]
    if status != "finished" and not unfinished:
        raise LabError(
            f"The run in {str(folder)!r} is not finished (status: {status}). Continue it with --resume_from_checkpoint "
            "latest, or push it as it is with --unfinished."
        )
    # The components of all kinds, as a run of another kind may be in the repository.
    patterns = _RUN_FILES + tuple(f"{part}/*" for part in {*parts_of_pipeline(folder), *components()})
    files = _files(folder, patterns)
    if "model_index.json" not in files:
        raise LabError(f"{str(folder)!r} holds no pipeline yet (model_index.json). Let the run save one first.")
    length, done = counted(record["train"]["num_updates"], "update"), updates_done(folder, record)
    if status == "finished":
        card = located_card(folder, repo_id, revision)
    else:
        card, length = unfinished_card(record, repo_id, done), f"{done} of {length}"
    return Contents("run", {**files, "README.md": card}, patterns, f"{length}: {command}")


def _study(folder: Path, repo_id: str, revision: str) -> Contents:
    if not (folder / "summary.json").exists():
        raise LabError(f"{str(folder)!r} has no summary yet. Finish the study with `lrlab study run`, then push it.")
    try:
        title = str(read_json(folder / "summary.json")["study"]["title"])
    except (KeyError, TypeError):
        raise LabError(f"{str(folder / 'summary.json')!r} is not the summary of a study.") from None
    runs = _files(folder, ("runs/*.json",))
    with tempfile.TemporaryDirectory() as temporary:
        card = folder
        if (folder / "runs").is_dir():  # else the folder is the card of a study already
            from ..study.report.card import write_study_card

            card = write_study_card(folder, Path(temporary) / "card").parent
        shown = {name: (card / name).read_bytes() for name in _files(card, _STUDY_FILES)}
        shown["README.md"] = located_card(card, repo_id, revision)
    return Contents("study", {**runs, **shown}, _STUDY_FILES, f"The study: {title}")


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
        result.source_name, result.source_url = (
            "lrlab/run.json",
            f"https://huggingface.co/{repo_id}/blob/{revision}/lrlab/run.json",
        )
    return str(card).encode()


def unfinished_card(record: dict[str, Any], repo_id: str, updates_done: int) -> bytes:
    """The card of a run that is not finished."""
    from huggingface_hub import ModelCardData

    from .card_facts import fill  # which imports torch

    data = ModelCardData(library_name="diffusers", tags=["diffusers", "diffusers_lrlab", "unfinished"])
    title = repo_id.split("/")[-1]
    return fill("unfinished_card.md", data, title=title, record=record, updates_done=updates_done).encode()
