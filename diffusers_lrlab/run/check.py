"""`lrlab check`: compare a folder with the hashes in its manifests."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..core.files import is_locked
from ..core.manifest import MANIFEST, find_damage, verify
from ..core.words import counted
from ..data.latents import LATENTS_FILE, read_latents_record
from ..hub.contents import KINDS, kind_of_folder
from ..hub.records import read_record
from ..training.run_folder import RECORD, SNAPSHOTS, RunFolder

_PARTS = ("checkpoint-*", f"{SNAPSHOTS}/*", "stacks/*", "local/*/checkpoint-*")  # folders with a manifest of their own


@dataclass
class Finding:
    """The result of verifying a folder."""

    kind: str  # "run", "study", "dataset" or "set of latents"
    folder: str
    status: str = ""
    whole: list[str] = field(default_factory=list)  # intact parts
    damaged: list[str] = field(default_factory=list)  # with the damage
    notes: list[str] = field(default_factory=list)
    remedy: str = ""

    def note(self, what: str, check: Callable[[], Any]) -> None:
        """Notes whether the check of a part passes."""
        try:
            check()
        except Exception as error:  # readers of damaged files raise errors of many kinds
            self.damaged.append(f"{what}: {str(error).partition(chr(10))[0] or type(error).__name__}")
        else:
            self.whole.append(what)

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "is_whole": not self.damaged}

    def describe(self) -> str:
        lines = [", ".join(filter(None, (f"{self.folder}: a {self.kind}", self.status)))]
        for title in ("whole", "notes", "damaged"):
            lines += [f"{title:>10}  {what}" for what in getattr(self, title)]
        return "\n".join([*lines, *([f"{'to go on':>10}  {self.remedy}"] if self.remedy else [])])


def check_folder(folder: Path) -> Finding:
    """Verifies the folder of a run, study, toy dataset or set of latents, also a downloaded one. Changes nothing."""
    is_run = any(folder.glob("checkpoint-*")) or (folder / "lrlab").is_dir()  # also one without a record
    kind = KINDS["run"] if is_run else kind_of_folder(folder)
    finding = Finding(kind.name, str(folder))
    if kind == KINDS["set of latents"]:
        finding.note(LATENTS_FILE, partial(read_latents_record, folder))
    elif is_run:
        _check_run(folder, finding)
    for part in sorted(path for pattern in _PARTS for path in folder.glob(pattern) if path.is_dir()):
        damage = find_damage(part)
        (finding.damaged if damage else finding.whole).append(damage or part.relative_to(folder).as_posix())
    held = verify(folder)
    finding.whole += [f"{counted(len(held.sums), 'file')} of {MANIFEST}"] if held.sums else []
    finding.damaged += held.damaged
    finding.notes += [held.note] if held.note else []
    finding.status = "being written by another process" if is_locked(folder) else finding.status
    if finding.damaged:
        whole = [path.name for path in RunFolder(folder).checkpoints() if path.name in finding.whole]
        option = f"--resume_from_checkpoint latest, which continues from {whole[-1]}" if whole else "--overwrite_output_dir"
        finding.remedy = kind.remedy.format(option=option)
    return finding


def _check_run(folder: Path, finding: Finding) -> None:
    finding.note(RECORD, partial(read_record, folder))
    if RECORD in finding.whole:
        record = read_record(folder)
        status, train = record["run"]["status"], record["train"]
        done = (
            f" after {train['updates_done']} of {counted(train['num_updates'], 'update')}" if "updates_done" in train else ""
        )
        finding.status = ("killed" if status == "running" else status) + done
