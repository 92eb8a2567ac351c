"""The files to upload of a run, a study, an exported dataset or a schedule."""

import dataclasses
import fnmatch
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LabError
from ..core.manifest import (
    MANIFEST,
    DamagedManifest,
    Sums,
    file_sums,
    find_damage,
    manifest_text,
    read_manifest,
    sums_of_bytes,
)
from ..core.words import counted
from ..data.latents.manifest import is_latents_folder
from ..schedules.published import read_schedule_file
from ..study.same_command import is_preset
from ..training.kinds.select import components
from ..training.record_schema import read_json
from ..training.run_files import parts_of_pipeline
from ..training.run_folder import RunFolder
from .cards import card_for_dataset, card_for_run, card_for_schedule, card_for_study, space_of_study
from .records import read_record, updates_done

# Checkpoints hold optimizer and random states, logs are the tracker's: neither is part of the result.
_RUN_FILES = ("model_index.json", "pipeline.py", "README.md", "lrlab/*")
_NEVER = ("*.npy", ".tmp-*", "*/.tmp-*", "*/.cache/*", ".lock*")
_CHECKPOINTS = ("checkpoint-*/*",)
_STUDY_FILES = (
    *("README.md", "*.png", "tables/*.tex", "summary.json", "summary.parquet", "runs.parquet", "spec.yaml", "runs/*.json"),
)
_STUDY_WEIGHTS = ("weights/*.safetensors",)
_DATASET_FILES: tuple[str, ...] = ("README.md", "points.png", "images.png", "data/*.parquet")
_SCHEDULE_FILES = ("README.md", "schedule.json", "schedule.png")
_MARKERS = {"run": "lrlab/run.json", "study": "spec.yaml", "schedule": "schedule.json", "dataset": "data/*.parquet"}
_SPACE_FILES = ("README.md", "index.html", "curves.csv", "seeds.csv", "summary.json", "spec.yaml")
REPO_TYPES = {"run": "model", "schedule": "model", "dataset": "dataset", "study": "dataset", "space": "space"}


@dataclass(frozen=True)
class Contents:
    """Files to upload."""

    type: str  # a key of `REPO_TYPES`
    files: Mapping[str, Path | bytes]  # by path in the repository: a local file, or its content
    owned: tuple[str, ...]  # patterns of files deleted from the repository unless they are among `files`
    message: str  # of the commit

    @property
    def repo_type(self) -> str:
        return REPO_TYPES[self.type]


def type_of_folder(folder: Path) -> str:
    """The type of a folder: "run", "study", "schedule" or "dataset"; raises a `LabError` for any other."""
    if not folder.is_dir():
        raise LabError(
            f"{str(folder)!r} is not a folder. Give the folder of a run, a study, an exported dataset or a schedule."
        )
    if is_latents_folder(folder):
        raise LabError(
            f"{str(folder)!r} holds latents, which are not uploaded. Hint: push the run that was trained on them."
        )
    for what, marker in _MARKERS.items():
        if next(folder.glob(marker), None) is not None:
            return what
    with suppress(DamagedManifest):  # the marker file may be lost
        if found := type_of_files(read_manifest(folder) or ()):
            return found
    raise LabError(
        f"{str(folder)!r} holds no run (lrlab/run.json), study (spec.yaml), exported dataset (data/*.parquet) or schedule "
        "(schedule.json). Give the folder that a command of this package wrote."
    )


def contents_of(
    folder: Path,
    repo_id: str,
    revision: str = "main",
    *,
    space: bool = False,
    include_checkpoints: bool = False,
    unfinished: bool = False,
) -> Contents:
    """
    The files to upload from the folder of a run, a study, an exported dataset or a schedule. The card loads from the branch
    `revision` of the repository.

    `space` is for the report of a study as a web page, or for a folder with such a page and its card. `include_checkpoints`
    adds the checkpoints of a run or the weights of a study, and `unfinished` accepts an unfinished run.
    """
    holds = "page" if space and is_page(folder) else type_of_folder(folder)
    if space and holds not in ("study", "page"):
        raise LabError(f"--space makes a page of a study's report, and {str(folder)!r} holds a {holds}. Leave it out.")
    if include_checkpoints and holds not in ("run", "study"):
        raise LabError(f"--include_checkpoints has no effect: {str(folder)!r} holds a {holds}. Leave it out.")
    if unfinished and holds != "run":
        raise LabError(f"--unfinished is for runs, and {str(folder)!r} holds a {holds}. Leave it out.")
    if holds == "page":
        return Contents("space", _files(folder, _SPACE_FILES), _SPACE_FILES, "A page")
    if holds == "run":
        return _run(folder, repo_id, revision, include_checkpoints, unfinished)
    if holds == "study":
        return _study(folder, repo_id, revision, space, include_checkpoints)
    if holds == "dataset":
        patterns, message = _DATASET_FILES, f"The dataset {folder.resolve().name}"
        card = card_for_dataset(folder, repo_id, revision)
    else:
        patterns, message = _SCHEDULE_FILES, f"The schedule {read_schedule_file(folder / 'schedule.json').text}"
        card = card_for_schedule(folder, repo_id, revision)
    return Contents(holds, {**_files(folder, patterns), "README.md": card.encode()}, patterns, message)


def is_page(folder: Path) -> bool:
    """Whether a folder holds a page and the card of a static Space, and nothing else."""
    if {path.name for path in folder.glob("*")} != {"index.html", "README.md"}:
        return False
    return "\nsdk: static\n" in (folder / "README.md").read_text(encoding="utf-8")


def with_manifest(contents: Contents, known: Mapping[str, Sums]) -> Contents:
    """The contents with their manifest; files whose sums are `known` are not read again."""
    if contents.type == "space":
        return contents
    sums = {}
    for name, content in contents.files.items():
        if isinstance(content, bytes):
            sums[name] = sums_of_bytes(content)
        elif name != MANIFEST:
            sums[name] = known.get(name) or file_sums(content)
    files = {**contents.files, MANIFEST: manifest_text(sums).encode()}
    return dataclasses.replace(contents, files=files, owned=(*contents.owned, MANIFEST))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern; patterns without a slash match top-level files only."""
    return any(fnmatch.fnmatchcase(name, each) and ("/" in each or "/" not in name) for each in patterns)


def type_of_files(names: Collection[str]) -> str | None:
    """The type of a repository with these files, if this package made it."""
    return next((what for what, marker in _MARKERS.items() if fnmatch.filter(names, marker)), None)


def _files(folder: Path, patterns: tuple[str, ...], without: tuple[str, ...] = ()) -> dict[str, Path]:
    """Files by relative path; raises a `LabError` for links to files outside the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        never = any(fnmatch.fnmatchcase(name, pattern) for pattern in (*_NEVER, *without))
        if never or not path.is_file() or not matches(name, patterns):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise LabError(f"{str(path)!r} is a link to a file outside of {str(folder)!r}. Put a copy in its place.")
        found[name] = path
    return found


def run_files(folder: Path) -> dict[str, Path]:
    return _files(folder, _run_patterns(folder))


def _run_patterns(folder: Path) -> tuple[str, ...]:
    """Patterns of a run's files; the components of all kinds, as a run of another kind may be in the repository."""
    return _RUN_FILES + tuple(f"{part}/*" for part in {*parts_of_pipeline(folder), *components()})


def _run(folder: Path, repo_id: str, revision: str, include_checkpoints: bool, unfinished: bool) -> Contents:
    record = read_record(folder)
    status, command = record["run"]["status"], record["run"]["command"]
    if status != "finished" and not unfinished:
        raise LabError(
            f"The run in {str(folder)!r} is not finished (status: {status}). Continue it with --resume_from_checkpoint "
            "latest, or push it as it is with --unfinished."
        )
    patterns = _run_patterns(folder) + (_CHECKPOINTS if include_checkpoints else ())
    files = _files(folder, patterns)
    if "model_index.json" not in files:
        raise LabError(f"{str(folder)!r} holds no pipeline yet (model_index.json). Let the run save one first.")
    for checkpoint in RunFolder(folder).checkpoints() if include_checkpoints else ():
        if damage := find_damage(checkpoint):
            raise LabError(f"{damage}, so {checkpoint.name} is not uploaded. Hint: `lrlab check` lists what is intact.")
    done, total = updates_done(folder, record), record["train"]["num_updates"]
    card = card_for_run(folder, record, repo_id, revision, done)
    length = counted(total, "update")
    message = f"{length if status == 'finished' else f'{done} of {length}'}: {command}"
    return Contents("run", {**files, "README.md": card.encode()}, patterns, message)


def _study(folder: Path, repo_id: str, revision: str, space: bool, include_weights: bool) -> Contents:
    if not (folder / "summary.json").exists():
        raise LabError(f"{str(folder)!r} has no summary yet. Finish the study with `lrlab study run`, then push it.")
    try:
        summary = read_json(folder / "summary.json")
        title = str(summary["study"]["title"])
    except (KeyError, TypeError):
        raise LabError(f"{str(folder / 'summary.json')!r} is not the summary of a study.") from None
    if space:
        page = folder / "report" / "index.html"
        if not page.exists():
            raise LabError(f"{str(folder)!r} has no report. Make one with `lrlab study report {folder}`.")
        of_space = space_of_study(summary, repo_id, revision, is_preset(folder))
        made: dict[str, Path | bytes] = {"index.html": page, "README.md": of_space.encode()}
        files = made | _files(page.parent, ("*.csv",)) | _files(folder, ("summary.json", "spec.yaml"))
        return Contents("space", files, _SPACE_FILES, f"The report of the study: {title}")
    weights = _STUDY_WEIGHTS if include_weights else ()
    results = _files(folder, ("runs/*.json", *weights))
    with tempfile.TemporaryDirectory() as temporary:
        card = folder
        if (folder / "runs").is_dir():  # else the folder is the card of a study already
            from ..study.report.card import write_study_card

            card = write_study_card(folder, Path(temporary) / "card").parent
        shown = {name: path.read_bytes() for name, path in _files(card, _STUDY_FILES).items()}
        shown["README.md"] = card_for_study(card, repo_id, revision).encode()
    return Contents("study", {**results, **shown}, _STUDY_FILES + weights, f"The study: {title}")
