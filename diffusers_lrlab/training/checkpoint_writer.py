"""When and how checkpoints are written, and which are kept.

What is saved is copied to the host between two updates. A thread writes the copy while training goes on; shards of FSDP,
which all processes write, are written at once.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..core.files import SHARED, atomic_folder, full_disk_explained, remove, temporary_beside
from .checkpoints import Contents, contents_of, save_shards
from .config import ResolvedConfig
from .divergence_rules import rollback_rule
from .run_files import check_own_checkpoint
from .run_folder import RunFolder, checkpoint_update
from .run_state import RunState
from .sharding import is_sharded


class CheckpointWriter:
    """
    Writes checkpoints, one at a time, in a thread of the main process; all processes call the same methods.

    What goes wrong in the thread is raised by the next call. Inside a `with` block a run may end as it likes: what is being
    written then is finished first.
    """

    _pending: Future[None] | None = None

    def __init__(self, accelerator: Accelerator, config: ResolvedConfig, folder: RunFolder):
        self.accelerator, self.config, self.folder = accelerator, config, folder
        self._begun_at = time.monotonic()

    def __enter__(self) -> Self:
        self._begun_at = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with suppress(*(() if kind is None else (Exception,))):  # it must not hide why the run ended
            self._wait()

    def is_due(self) -> bool:
        """Whether the last one, or the start, is as old as it has to be for another one."""
        if not self.config.checkpointing_min_seconds:
            return True
        values = [time.monotonic() - self._begun_at >= self.config.checkpointing_min_seconds]
        broadcast_object_list(values)
        return values[0]

    def begin(self, run: RunState, more: dict[str, Any], rows: Any = None) -> Path:
        """
        Begins `checkpoint-<update>`, once the one before is whole, between two updates; it appears atomically, and then the
        oldest ones are removed. `more` is saved beside the state of the run, and `rows` of losses by noise level.
        """
        self._wait()
        path = self.folder.path / f"checkpoint-{run.update}"
        contents = contents_of(self.accelerator, run, more, self.folder, rows)
        self._begun_at = time.monotonic()
        if is_sharded(self.accelerator):
            self._write_sharded(run, path, contents)
        elif self.accelerator.is_main_process:
            executor = ThreadPoolExecutor(1, "write checkpoint")
            self._pending = executor.submit(self._write, path, contents)
            executor.shutdown(wait=False)
        return path

    def finish(self) -> None:
        """Waits, with all processes, until the last one is whole."""
        self._wait()
        self.accelerator.wait_for_everyone()

    def check(self) -> None:
        """Raises what went wrong, if that is known by now."""
        if self._pending is not None and self._pending.done():
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, path: Path, contents: Contents) -> None:
        check_own_checkpoint(path)
        with atomic_folder(path, shared=True) as temporary:
            contents.write(temporary, self.folder)
            check_own_checkpoint(path)
        remove_old_checkpoints(self.folder, self.config)

    def _write_sharded(self, run: RunState, path: Path, contents: Contents) -> None:
        accelerator = self.accelerator
        if accelerator.is_main_process:
            check_own_checkpoint(path)
            with atomic_folder(path, shared=True) as temporary:
                accelerator.wait_for_everyone()
                save_shards(accelerator, run, temporary)
                accelerator.wait_for_everyone()
                contents.write(temporary, self.folder)
                check_own_checkpoint(path)
            remove_old_checkpoints(self.folder, self.config)
        else:
            accelerator.wait_for_everyone()
            with full_disk_explained(path):
                save_shards(accelerator, run, temporary_beside(path, SHARED))
            accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()


def regular_checkpoints(folder: RunFolder, config: ResolvedConfig) -> list[Path]:
    """Checkpoints at multiples of --checkpointing_steps; one saved on a signal must not change where a run returns to."""
    return [path for path in folder.checkpoints() if checkpoint_update(path) % config.checkpointing_steps == 0]


def kept_checkpoints(folder: RunFolder, config: ResolvedConfig) -> list[Path]:
    """What `checkpoints_total_limit` leaves: the newest, and of a run that may go back the newest regular ones."""
    everything, limit = folder.checkpoints(), config.checkpoints_total_limit
    if not limit:
        return everything
    found = everything if rollback_rule(config) is None else regular_checkpoints(folder, config)
    return [*found[-limit:], *everything[-1:]]


def remove_old_checkpoints(folder: RunFolder, config: ResolvedConfig) -> None:
    """Removes what `checkpoints_total_limit` does not leave; at a resume what a killed run did not come to remove."""
    kept = kept_checkpoints(folder, config)
    for old in folder.checkpoints():
        if old not in kept:
            remove(old)
