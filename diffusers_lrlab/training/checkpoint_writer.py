"""Writes and removes checkpoints.

The state is copied to the host between two updates, and a thread writes the copy during training.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from typing_extensions import Self

from ..core.background import BackgroundWrite
from ..core.errors import LabError, how_to_continue
from ..core.files import atomic_folder, remove
from .checkpoints import Contents, contents_of
from .config import ResolvedConfig
from .run_files import is_checkpoint
from .run_folder import RunFolder, checkpoint_update
from .run_state import RunState


class CheckpointWriter:
    """
    Writes checkpoints, one at a time, in a thread of the main process; all processes call the same methods.

    Errors of the thread are raised by the next call. A `with` block waits at its end for the checkpoint being written.
    """

    def __init__(self, accelerator: Accelerator, config: ResolvedConfig, folder: RunFolder):
        self.accelerator, self.config, self.folder = accelerator, config, folder
        self._writing = BackgroundWrite("write checkpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writing.__exit__(*error)

    def begin(self, run: RunState, more: dict[str, Any], rows: Any = None) -> Path:
        """
        Starts writing `checkpoint-<update>` between two updates, once the previous one is finished. It appears atomically,
        and then the oldest are removed. `more` state and `rows` of losses by noise level are saved, too.
        """
        self._writing.wait()
        path = self.folder.path / f"checkpoint-{run.update}"
        contents = contents_of(self.accelerator, run, more, self.folder, rows)
        if self.accelerator.is_main_process:
            self._writing.start(self._write, path, contents)
        return path

    def finish(self) -> None:
        """Waits, with all processes, until the last checkpoint is written."""
        self._writing.wait()
        self.accelerator.wait_for_everyone()

    def check(self) -> None:
        """Raises an error of the thread, if there was one."""
        self._writing.check()

    def _write(self, path: Path, contents: Contents) -> None:
        if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
            raise LabError(f"{str(path)!r} is not a checkpoint of a run. Hint: move it away, then {how_to_continue()}.")
        with atomic_folder(path) as temporary:
            contents.write(temporary, self.folder)
        remove_old_checkpoints(self.folder, self.config)


def is_kept_for_good(update: int, config: ResolvedConfig) -> bool:
    """Whether --keep_every keeps a checkpoint of this update, to branch or extend from."""
    return config.keep_every is not None and update % config.keep_every == 0


def kept_checkpoints(folder: RunFolder, config: ResolvedConfig) -> list[Path]:
    """The checkpoints that `checkpoints_total_limit` keeps, the newest ones, and those of `keep_every`."""
    everything, limit = folder.checkpoints(), config.checkpoints_total_limit
    if not limit:
        return everything
    for_good = [path for path in everything if is_kept_for_good(checkpoint_update(path), config)]
    return [*for_good, *everything[-limit:]]


def remove_old_checkpoints(folder: RunFolder, config: ResolvedConfig) -> None:
    """Removes checkpoints beyond `checkpoints_total_limit`; at a resume also those that a killed run left."""
    kept = kept_checkpoints(folder, config)
    for old in folder.checkpoints():
        if old not in kept:
            remove(old)
