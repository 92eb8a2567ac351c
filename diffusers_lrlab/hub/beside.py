"""Uploads in the middle of a run, by a process of their own: a Hub that is slow or away neither stops nor slows training."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..core.errors import LabError
from .access import say
from .contents import run_files

if TYPE_CHECKING:
    from ..training.config import ResolvedConfig

_PATIENCE = 600  # seconds at the end of the run, for an upload that is still going on


class PushesBeside:
    """
    Uploads what a run has saved so far, one upload at a time; whatever fails is told, and the upload at the end takes it.

    Args:
        folder (`Path`): Of the run.
        config ([`ResolvedConfig`]): After [`check_can_push`].
    """

    def __init__(self, folder: Path, config: ResolvedConfig):
        self.folder, self.config = folder, config
        # The number keeps it apart from that of a run that was killed, and whose upload may be still going on.
        self._snapshot = folder / f".tmp-{os.getpid()}-push"
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[str] | None = None
        self._update = 0

    def __call__(self, update: int) -> None:
        """Starts to upload what is saved now; leaves it out, with a word, if the last upload is still going on."""
        if self._process is not None and self._process.poll() is None:
            say(
                f"warning: the upload of update {self._update} is still going on, so that of update {update} is left out. "
                "The one at the end takes everything."
            )
            return
        self._tell()
        try:
            self._copy()
            self._update = update
            self._output = (self._snapshot / ".output").open("w+", encoding="utf-8")
            self._process = subprocess.Popen(
                self._command(update),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=self._environment(),
            )
        except (OSError, LabError) as error:
            shutil.rmtree(self._snapshot, ignore_errors=True)
            say(f"warning: no upload at update {update}: {error}. Training goes on; the upload at the end takes everything.")

    def _copy(self) -> None:
        """A copy that training does not change under the upload."""
        shutil.rmtree(self._snapshot, ignore_errors=True)
        for name, path in run_files(self.folder).items():
            assert isinstance(path, Path)
            to = self._snapshot / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                with contextlib.suppress(OSError):  # where there are no links, it is copied
                    os.link(path, to)  # weights are replaced whole, never changed
                    continue
            shutil.copyfile(path, to)

    def _command(self, update: int) -> list[str]:
        assert self.config.hub_model_id is not None
        return [
            *(sys.executable, "-m", "diffusers_lrlab.cli.main", "push", str(self._snapshot), "--unfinished"),
            *("--repo_id", self.config.hub_model_id, "--message", f"Update {update}, training goes on"),
        ]  # it is private already, if that was asked for: the repository was made before training

    def _environment(self) -> dict[str, str]:
        """The token goes by the environment, where no list of processes shows it."""
        token = {"HF_TOKEN": self.config.hub_token} if self.config.hub_token else {}
        root = str(Path(__file__).parents[2])
        return {**os.environ, **token, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}

    def _tell(self) -> None:
        """What became of the last upload, if it failed; and whatever else it left is removed."""
        if self._process is not None and self._output is not None:
            if self._process.returncode:
                self._output.seek(0)
                last = self._output.read().strip()[-2000:]
                say(
                    f"warning: the upload at update {self._update} failed: {last}\nTraining goes on; the upload at the end "
                    "takes everything."
                )
            self._output.close()
        self._process = self._output = None
        shutil.rmtree(self._snapshot, ignore_errors=True)

    def finish(self) -> None:
        """Waits for the last upload, before that of the end; one that takes too long is ended, and so it is by a signal."""
        try:
            if self._process is not None:
                self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            say(f"warning: the upload of update {self._update} took more than {_PATIENCE} s and was ended.")
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends an upload that is still going on; the repository then is as it was before it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._process.returncode = 0  # ended by us, which is no failure to tell
        self._tell()
