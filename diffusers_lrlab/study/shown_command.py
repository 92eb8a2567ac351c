"""The command of a study as its report and card show it, and the data sets and presets that it names."""

import hashlib
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from .. import __version__
from ..core.errors import must_be
from ..core.files import expanded
from ..core.manifest import verify

PRESETS = "(presets)"  # stored as the folder of presets of the package
PRESETS_FOLDER = Path(__file__).parent / "spec" / "presets"


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


def shown_command(program: str, what: str | Path, out: str | Path, given: dict[str, Any]) -> str:
    """The command as the report shows it, without local folders; options that are `None` are omitted."""
    where = f"{program} {shown_path(what)} --out {shown_path(out)}"
    return where + "".join(f" --{name} {value}" for name, value in given.items() if value is not None)


def command_of_card(command: str, name: str, by_preset: bool) -> str:
    """The command that repeats a study for those who have its card: by the preset's name, or by its `spec.yaml`."""
    words = shlex.split(command)
    if "--out" not in words[1:-1]:
        return command
    rest = words[words.index("--out") + 2 :]
    return shlex.join(["lrlab", "study", "run", name if by_preset else "spec.yaml", "--out", name, *rest])


def is_preset(folder: Path) -> bool:
    """Whether the study in a folder is a preset of this package, by its `spec.yaml`."""
    spec = yaml.safe_load((folder / "spec.yaml").read_text(encoding="utf-8"))["spec"]
    return spec.get("folder") == PRESETS and spec["name"] in preset_names()


def shown_path(path: str | Path) -> str:
    """A path in a published command, without local folders."""
    return shlex.quote(Path(path).name if Path(path).is_absolute() else str(path))


def names_in(dataset_names: str | Sequence[str] | None) -> list[str]:
    """
    The data sets in values of `--dataset_name`, repeated or separated by commas, which the name of a folder may have; a
    `LabError` for others.
    """
    values = [dataset_names] if isinstance(dataset_names, str) else list(dataset_names or ())
    if not all(isinstance(value, str) for value in values):
        raise must_be("dataset_name", dataset_names, "a name or a list of names", "such as ['dino', './photos']")
    parts = ([value] if expanded(value).is_dir() else value.split(",") for value in values)
    return [name.strip() for names in parts for name in names]


def shown_names(names: Sequence[str]) -> str | None:
    """Data sets in a published command, without local folders; `None` for none."""
    return ",".join(map(shown_path, names)) or None


def preset_sum(what: object) -> str | None:
    """SHA-256 of a preset's text and of the package version, which decide all its results; `None` for other studies."""
    if not isinstance(what, str) or what not in preset_names():
        return None
    text = (PRESETS_FOLDER / f"{what}.yaml").read_bytes()
    return hashlib.sha256(__version__.encode() + b"\n" + text).hexdigest()


def finished_report(what: str, out: Path, command: str) -> Path | None:
    """The page of a preset's study that this command finished before, if its files are unchanged; otherwise `None`."""
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        saved = yaml.safe_load((out / "spec.yaml").read_text(encoding="utf-8"))
        if saved["command"] != command or saved["preset"] is None or saved["preset"] != preset_sum(what):
            return None
        found, page = verify(out), "report/index.html"
        if not found.damaged and not found.note and page in found.sums:
            return out / page
    return None
