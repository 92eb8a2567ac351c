"""`lrlab check`: verify a folder, with its intact and damaged files and the resume point."""

from functools import partial
from pathlib import Path

from ..core.errors import LabError
from ..core.extras import require_extra
from ..core.lock import locked
from ..core.words import counted
from ..data.latents.manifest import LATENTS_FILE, ROWS_FILE, check_rows, is_latents_folder, read_latents_manifest
from ..hub.cards import parsed_card
from ..hub.contents import type_of_folder
from .check_run import check_run, repair_run
from .finding import Finding, read_parquet


def check_folder(folder: Path, repair: bool = False) -> Finding:
    """
    Verifies the folder of a run, study, toy dataset or set of latents, also a downloaded one.

    `repair` renames damaged files of a run or study, so that it continues from intact ones. It deletes only unfinished files
    of killed processes.
    """
    check, repaired = _CHECKS[_kind(folder)], []
    if repair:
        repaired = _repair(folder)
    finding = check(folder)
    finding.repaired = repaired
    return finding


def _kind(folder: Path) -> str:
    if is_latents_folder(folder):
        return _LATENTS
    is_run = any(folder.glob("checkpoint-*")) or (folder / "lrlab").is_dir()
    return "run" if is_run else type_of_folder(folder)  # also a run without a record


def _repair(folder: Path) -> list[str]:
    kind = _kind(folder)
    if kind not in ("run", "study"):
        raise LabError(f"--repair is for runs and studies, but {str(folder)!r} holds a {kind}. Make or download it again.")
    if kind == "run":
        with locked(folder, "DIR"):
            return list(repair_run(folder))
    from ..study.runs.results import StudyFolder
    from .check_study import repair_study

    with StudyFolder(folder).locked():
        return list(repair_study(folder))


def _check_study(folder: Path) -> Finding:
    require_extra("study", "`lrlab check` of a study")
    from .check_study import check_study

    return check_study(folder)


def _check_dataset(folder: Path) -> Finding:
    finding = Finding("dataset", str(folder), "as parquet files")
    for file in sorted((folder / "data").glob("*.parquet")):
        finding.note(f"data/{file.name}", partial(read_parquet, file))
    finding.note("README.md", lambda: parsed_card((folder / "README.md").read_text(encoding="utf-8"), "README.md"))
    finding.hold(folder)
    if finding.damaged:
        finding.remedy = "make it again with the command in its README.md, or download it again"
    return finding


def _check_latents(folder: Path) -> Finding:
    finding = Finding(_LATENTS, str(folder), "finished")
    finding.note(LATENTS_FILE, partial(read_latents_manifest, folder))
    if not finding.damaged:
        manifest = read_latents_manifest(folder)
        finding.note(ROWS_FILE, partial(check_rows, folder, manifest))
        finding.status = f"finished, {counted(manifest.num_images, 'image')}"
    if finding.damaged:
        finding.remedy = "remove the folder and encode the images again"
    return finding


_LATENTS = "set of latents"
_CHECKS = {
    "run": check_run,
    "study": _check_study,
    "dataset": _check_dataset,
    _LATENTS: _check_latents,
}
