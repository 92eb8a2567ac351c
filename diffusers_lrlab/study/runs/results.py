"""The folder of a study, with one file for each run, which is either complete or absent."""

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import LabError, did_you_mean, must_be
from ...core.files import LOCK, locked, remove_leftovers, write_text
from ...core.manifest import (
    MANIFEST,
    checksum_matches,
    open_manifest,
    sums_in,
    with_sum,
    write_manifest,
)
from ..spec.spec import PRESETS, Cell, RunSpec, StudySpec


class RunResult:
    """The result of a run, from its record with the sections `run`, `train`, `curves`, `samples`, `config`, `meta`."""

    def __init__(self, record: dict[str, Any]):
        self.record, run = record, record["run"]
        self.id: str = run["id"]
        self.arm: str = run["arm"]
        self.dataset: str = run["dataset"]
        self.seed: int = run["seed"]
        self.stage: str = run["stage"]  # "tune" for a run that chose a learning rate, else "compare"
        self.status: str = run["status"]  # "finished" or "diverged"
        self.learning_rate: float = run["learning_rate"]  # the peak
        self.results: dict[str, float] = record["train"]["results"]  # values by metric; empty if it diverged
        self.curves: dict[str, dict[str, list[float]]] = record["curves"]
        self.samples: dict[str, Any] = record.get("samples") or {}
        self.config: dict[str, Any] = record["config"]


def by_cell(results: Iterable[RunResult]) -> dict[Cell, list[RunResult]]:
    """The results of each arm on each data set."""
    cells: dict[Cell, list[RunResult]] = {}
    for result in results:
        cells.setdefault((result.arm, result.dataset), []).append(result)
    return cells


# Files of `report/`, which a new report replaces; others are kept.
REPORT_FILES = ("*.png", "*.csv", "index.html", "report.md", "tables/*.tex", "figures/*")


def sources(datasets: dict[str, dict[str, Any]]) -> list[str]:
    """The data sets of a study as they are given."""
    given = (fields.get("dataset_name") or fields.get("train_data_dir") or name for name, fields in datasets.items())
    return [*dict.fromkeys(given)]


class StudyFolder:
    """The folder of a study, `--out`: its paths, its lock, and the results in it."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged: set[str] = set()  # runs whose files cannot be read

    def run_file(self, run_id: str) -> Path:
        return self.path / "runs" / f"{run_id}.json"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder inside this block; raises a `LabError` if another process holds the lock."""
        with locked(self.path, "--out"):
            remove_leftovers(*(self.path / name for name in ("runs", "stacks", "local")))
            yield

    def check_is_study(self, spec: StudySpec, dataset_names: Sequence[str] = ()) -> None:
        """
        Raises a `LabError` if the folder holds anything but this study, or holds it on other data sets, if `--dataset_name`
        gave these now or then. (A study file with other data sets adds or drops runs.)
        """
        saved, there = self._saved_spec(), sorted(entry.name for entry in self.path.glob("[!.]*"))
        if saved is None or saved["spec"]["name"] != spec.name:
            if saved is not None:
                got = f"that of the study {saved['spec']['name']!r}"
            elif there or self.path.is_file():
                got = f"one with {', '.join(there[:3])} and no readable spec.yaml" if there else "a file"
            else:
                return
            wanted = f"a new or empty folder, or that of the study {spec.name!r}"
            raise must_be("--out", str(self.path), wanted, "give another folder", got=got)
        here, now = (", ".join(sources(datasets)) for datasets in (saved["spec"]["datasets"], spec.datasets))
        if here != now and (dataset_names or "--dataset_name" in shlex.split(saved["command"])):
            wanted = f"as in {str(self.path)!r}, which has the study on {here}"
            remedy = "give the same --dataset_name, or another --out"
            raise must_be("--dataset_name", ",".join(dataset_names) or now, wanted, remedy, got=now)

    def write_spec(self, spec: StudySpec, command: str, preset: str | None = None) -> None:
        """Writes `spec.yaml`; `preset` is the sum by which [`finished_report`] recognises the study of a preset."""
        saved = json.loads(json.dumps(spec.to_dict()))
        if spec.folder != PRESETS:  # relative: both can be moved together, and no local path is published
            saved["folder"] = os.path.relpath(spec.folder, self.path.resolve())
        write_text(
            self.path / "spec.yaml", yaml.safe_dump({"command": command, "preset": preset, "spec": saved}, sort_keys=False)
        )

    def read_spec(self) -> tuple[dict[str, Any], str]:
        """The specification of the last command, as data, and the command itself."""
        file = self.path / "spec.yaml"
        if not file.exists():
            hint = did_you_mean(str(self.path), (str(file.parent) for file in self.path.parent.glob("*/spec.yaml")))
            raise LabError(f"There is no study in {str(self.path)!r}.{hint} Run one with `lrlab study run SPEC --out DIR`.")
        saved = self._saved_spec()
        if saved is None:
            raise LabError(f"{str(file)!r} is damaged. Restore it, or run the study into another folder.")
        return saved["spec"], saved["command"]

    def _saved_spec(self) -> dict[str, Any] | None:
        """What [`write_spec`] wrote, if it can be read."""
        with suppress(OSError, ValueError, TypeError, yaml.YAMLError):
            saved = yaml.safe_load((self.path / "spec.yaml").read_text(encoding="utf-8"))
            if isinstance(saved, dict) and {"command", "spec"} <= {*saved} and {"name", "datasets"} <= {*saved["spec"]}:
                return saved
        return None

    def read(self, run_id: str) -> RunResult | None:
        """The result of a run; `None` if it is missing, or damaged, which is noted."""
        file = self.run_file(run_id)
        if not file.exists():
            return None
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            result = RunResult(record)
            if (result.id, result.results is None, checksum_matches(record)) == (run_id, False, True):
                return result
        self.damaged.add(run_id)
        return None

    def results(self, specs: Iterable[RunSpec]) -> list[RunResult]:
        found = (self.read(spec.id) for spec in specs)
        return [result for result in found if result is not None]

    def missing(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        return [spec for spec in specs if self.read(spec.id) is None]

    def check_results(self, specs: Iterable[RunSpec]) -> None:
        """Raises a `LabError` if results are damaged."""
        if damaged := self.damaged & {spec.id for spec in self.missing(specs)}:
            each = "; ".join(f"{str(self.run_file(run_id))!r} is damaged" for run_id in sorted(damaged))
            raise LabError(f"{each}. Give the command of the study again, which repeats these runs.")

    def unknown_files(self, specs: Iterable[RunSpec]) -> list[str]:
        """Results of runs that are not part of the study."""
        known = {spec.id for spec in specs}
        return sorted(file.stem for file in (self.path / "runs").glob("*.json") if file.stem not in known)

    def write(self, record: dict[str, Any]) -> None:
        """Writes the result of a run; non-finite numbers become null."""
        text = json.dumps(with_sum(finite(record)), indent=1, allow_nan=False)
        write_text(self.run_file(record["run"]["id"]), text + "\n")

    def reopen(self) -> None:
        """Marks an existing manifest as open, because files are about to change."""
        if (self.path / MANIFEST).exists():
            open_manifest(self.path)

    def write_manifest(self, results: Iterable[RunResult]) -> None:
        """
        Writes the hashes of all files of a study with these results. A card has no result files, so its manifest covers all
        of its files.
        """
        if not (self.path / "runs").exists():
            there = (path for path in self.path.rglob("*") if path.name != LOCK)  # held meanwhile
            write_manifest(self.path, sums_in(self.path, there))
            return
        parts = ("spec.yaml", "runs.parquet", "summary.json", "summary.parquet")
        files = [self.path / name for name in parts] + [self.run_file(result.id) for result in results]
        files += [path for pattern in REPORT_FILES for path in (self.path / "report").glob(pattern)]
        write_manifest(self.path, sums_in(self.path, files))


def finite(value: Any) -> Any:
    """The data with `None` in place of non-finite numbers, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
