"""Uploads during a run, in a separate process: a slow or unreachable Hub neither stops nor slows training."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import LabError
from ..core.files import temporary_beside
from .access import log
from .contents import run_files
from .publish import training_target

if TYPE_CHECKING:
    from ..training.config import ResolvedConfig

_PATIENCE = 600  # seconds at the end of the run, for an upload that is still running
_LATER = "Training continues; the upload at the end includes everything."


class BackgroundUploads:
    """Uploads of what a run has saved so far, one at a time, after [`check_can_push`]. Failures are logged."""

    def __init__(self, folder: Path, config: ResolvedConfig):
        self.folder, self.target = folder, training_target(config)
        # The number keeps it apart from that of a killed run, whose upload may still be running.
        self._snapshot = temporary_beside(folder / "push")
        self._process: subprocess.Popen[bytes] | None = None
        self._update = 0

    def __call__(self, update: int) -> None:
        """Starts an upload of what is saved now, unless the last one is still running."""
        if self._process is not None and self._process.poll() is None:
            log(f"warning: no upload at update {update}: that of update {self._update} is still running. {_LATER}")
            return
        self._clean_up()
        try:
            self._copy()
            self._update = update
            with self._output.open("w") as output:
                self._process = subprocess.Popen(
                    self._command(update), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment()
                )
        except (OSError, LabError) as error:
            shutil.rmtree(self._snapshot, ignore_errors=True)
            log(f"warning: no upload at update {update}: {error}. {_LATER}")

    @property
    def _output(self) -> Path:
        return self._snapshot / ".output"

    def _copy(self) -> None:
        """Copies the files, which training may replace during the upload."""
        for name, path in run_files(self.folder).items():
            to = self._snapshot / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                with contextlib.suppress(OSError):  # a file system without links: copy
                    os.link(path, to)  # weights are replaced, never changed in place
                    continue
            shutil.copyfile(path, to)

    def _command(self, update: int) -> list[str]:
        return [
            *(sys.executable, "-m", "diffusers_lrlab.cli.main", "push", str(self._snapshot), "--unfinished"),
            *("--repo_id", self.target.repo_id, "--message", f"Update {update}, training continues"),
        ]  # no --private: the repository was created before training

    def _environment(self) -> dict[str, str]:
        """Holds the token, which process lists would show as an argument."""
        token = {"HF_TOKEN": self.target.token} if self.target.token else {}
        root = str(Path(__file__).parents[2])
        return {**os.environ, **token, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}

    def _clean_up(self) -> None:
        """Logs why the last upload failed, if it did, and removes its files."""
        if self._process is not None and self._process.returncode:
            why = self._output.read_text(encoding="utf-8").strip()[-2000:]
            why = why.replace(str(self._snapshot), str(self.folder))  # the copy goes
            log(f"warning: the upload at update {self._update} failed: {why}\n{_LATER}")
        self._process = None
        shutil.rmtree(self._snapshot, ignore_errors=True)

    def finish(self) -> None:
        """Waits for the running upload, before the one at the end; kills it if it takes too long."""
        try:
            if self._process is not None:
                if self._process.poll() is None:
                    log(f"Waiting for the upload of update {self._update}, {_PATIENCE} s at most.")
                self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            log(f"warning: the upload of update {self._update} took more than {_PATIENCE} s and was killed.")
        finally:
            self.stop()

    def stop(self) -> None:
        """Kills a running upload, which leaves the repository unchanged."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._process.returncode = 0  # not a failure
        self._clean_up()
