"""The folder of a study: one file for each run, that is there whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ...core.errors import LabError
from ...core.files import atomic_file, write_text
from ..spec.spec import PRESETS, RunSpec, StudySpec

_ENDED = ("finished", "diverged")


@dataclass(frozen=True)
class RunResult:
    """
    What came out of a run.

    Args:
        record (`dict`): The file of the run: sections `run`, `train`, `curves`, `samples`, `config`, `meta`.
    """

    record: dict[str, Any]

    @property
    def id(self) -> str:
        """The name of its file."""
        return self.record["run"]["id"]

    @property
    def arm(self) -> str:
        """Its arm."""
        return self.record["run"]["arm"]

    @property
    def dataset(self) -> str:
        """Its data set."""
        return self.record["run"]["dataset"]

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.record["run"]["seed"]

    @property
    def stage(self) -> str:
        """What it is for: "tune" if it only served to choose a learning rate, else "compare"."""
        return self.record["run"]["stage"]

    @property
    def status(self) -> str:
        """How it ended: "finished" or "diverged"."""
        return self.record["run"]["status"]

    @property
    def learning_rate(self) -> float:
        """The peak."""
        return self.record["run"]["learning_rate"]

    @property
    def results(self) -> dict[str, float]:
        """From metrics to figures; empty if it diverged."""
        return self.record["train"]["results"]

    @property
    def curves(self) -> dict[str, dict[str, list[float]]]:
        """Losses, and quality at the evaluation points."""
        return self.record["curves"]

    @property
    def samples(self) -> dict[str, Any]:
        """Some, for pictures."""
        return self.record.get("samples") or {}

    @property
    def config(self) -> dict[str, Any]:
        """Every field of the training configuration."""
        return self.record["config"]


class StudyFolder:
    """
    Paths of a study, and who may write there.

    Args:
        path (`Path`): `--out`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.damaged: set[str] = set()  # runs whose files were found and could not be read

    def run_file(self, run_id: str) -> Path:
        """Where the result of a run is."""
        return self.path / "runs" / f"{run_id}.json"

    def weights_file(self, run_id: str) -> Path:
        """Where the averaged weights of a run are."""
        return self.path / "weights" / f"{run_id}.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Nobody else writes into the folder inside this block.

        Raises:
            LabError: if somebody does; it says who.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"--out {str(self.path)!r} cannot be made ({error.strerror}). Give another folder.") from None
        holder = self.path / ".lock-holder"
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
            raise LabError(
                f"{str(self.path)!r} is being written by {who}. Wait for it, stop it, or give another --out."
            ) from None
        except OSError as error:
            raise LabError(f"--out {str(self.path)!r} cannot be written ({error.strerror}). Give another one.") from None
        try:
            write_text(holder, f"process {os.getpid()} on {socket.gethostname()}")
            self._remove_leftovers()
            yield
        finally:
            holder.unlink(missing_ok=True)
            lock.release()

    def _remove_leftovers(self) -> None:
        """Files that a process which was killed had not written to their end."""
        for pattern in (".tmp-*", "runs/.tmp-*", "weights/.tmp-*", "stacks/.tmp-*"):
            for file in self.path.glob(pattern):
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    def check_is_study(self, name: str) -> None:
        """Raises a `LabError` if the folder holds something else than a study of this name."""
        if self.path.is_file():
            raise LabError(f"--out {str(self.path)!r} is a file. Give a folder.")
        if self.path.is_dir() and not (self.path / "spec.yaml").exists():
            if others := sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")):
                raise LabError(
                    f"--out {str(self.path)!r} holds other files ({', '.join(others[:3])}) and no study. Give a new or "
                    "empty folder; nothing is ever overwritten unasked."
                )
        if (self.path / "spec.yaml").exists() and (kept := self.read_spec()[0]["name"]) != name:
            raise LabError(
                f"--out {str(self.path)!r} holds the study {kept!r}, and this is {name!r}, whose report would take the "
                "place of the other's. Give another folder."
            )

    def write_spec(self, spec: StudySpec, command: str) -> None:
        """Keeps what was asked for, and how."""
        kept = json.loads(json.dumps(spec.to_dict()))
        if spec.folder != PRESETS:  # relative, so that both can be moved together, and nobody reads where they are
            kept["folder"] = os.path.relpath(spec.folder, self.path.resolve())
        text = yaml.safe_dump({"command": command, "spec": kept}, sort_keys=False)
        write_text(self.path / "spec.yaml", text)

    def read_spec(self) -> tuple[dict[str, Any], str]:
        """What was asked for last, and how."""
        file = self.path / "spec.yaml"
        if not file.exists():
            raise LabError(f"There is no study in {str(self.path)!r}. Make one by `lrlab study run SPEC --out DIR`.")
        kept = yaml.safe_load(file.read_text(encoding="utf-8"))
        return kept["spec"], kept["command"]

    def read(self, run_id: str) -> RunResult | None:
        """The result of a run; `None` if there is none, or half of one, which is noted."""
        file = self.run_file(run_id)
        if not file.exists():
            return None
        try:
            result = RunResult(json.loads(file.read_text(encoding="utf-8")))
            if result.id == run_id and result.status in _ENDED and result.results is not None:
                return result
        except (ValueError, KeyError, TypeError):
            pass
        self.damaged.add(run_id)
        return None

    def results(self, specs: Iterable[RunSpec]) -> list[RunResult]:
        """Those that are there, in the order of the runs."""
        found = (self.read(spec.id) for spec in specs)
        return [result for result in found if result is not None]

    def missing(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        """Runs without a result."""
        return [spec for spec in specs if self.read(spec.id) is None]

    def strangers(self, specs: Iterable[RunSpec]) -> list[str]:
        """Files of runs that are not, or no longer, part of the study."""
        known = {spec.id for spec in specs}
        return sorted(file.stem for file in (self.path / "runs").glob("*.json") if file.stem not in known)

    def write(self, record: dict[str, Any]) -> None:
        """Writes the result of a run; numbers that are not finite become null."""
        text = json.dumps(finite(record), indent=1, allow_nan=False) + "\n"
        write_text(self.run_file(record["run"]["id"]), text)

    def write_weights(self, run_id: str, tensors: dict[str, Any]) -> None:
        """Keeps weights of a run, for what is measured between runs."""
        from safetensors.torch import save_file

        with atomic_file(self.weights_file(run_id)) as path:
            save_file(tensors, path)


def finite(value: Any) -> Any:
    """The same data with `None` in the place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
