"""Snapshots of the post-hoc averages of a run, in its folder."""

from pathlib import Path
from typing import Any

from typing_extensions import Self

from ..averaging.averages import EMA
from ..averaging.snapshots import copy_snapshot, snapshot_folder, snapshots_in, update_of, write_snapshot
from ..core.background import BackgroundWrite
from ..core.errors import warn
from ..core.files import remove
from ..core.manifest import find_damage
from ..core.options import names_where
from .config import TrainingConfig
from .host_copies import on_host
from .run_files import SNAPSHOTS
from .run_folder import RunFolder
from .run_state import RunState


def identity_of(config: dict[str, Any]) -> dict[str, Any]:
    """The options that distinguish one run from another, from its record or its configuration."""
    names = names_where(TrainingConfig, decides_result=True, may_change_on_resume=False)
    return {name: config[name] for name in names if name in config}


def inherit_snapshots(giver: RunFolder, taker: RunFolder, update: int, config: dict[str, Any]) -> None:
    """Copies the snapshots of a run up to an update, for one of this configuration that continues from there."""
    for source in inheritable(giver, update):
        if damage := find_damage(source):
            warn(f"The snapshot {source.name} is damaged, and is not copied: {damage}.")
        else:
            copy_snapshot(source, snapshot_folder(taker.path / SNAPSHOTS, update_of(source)), identity_of(config))


def inheritable(giver: RunFolder, update: int) -> list[Path]:
    """The snapshots of a run up to an update."""
    return [path for path in snapshots_in(giver.path / SNAPSHOTS) if update_of(path) <= update]


class SnapshotWriter:
    """
    Writer of snapshots at the updates of the plan. The averages are copied to the host between two updates, and a thread of
    the main process writes the copy. A `with` block waits at its end for it.
    """

    def __init__(self, run: RunState, folder: RunFolder):
        self.run, self.folder = run, folder
        self.updates = run.plan.snapshot_updates
        self.path = folder.path / SNAPSHOTS
        self._writing = BackgroundWrite("write snapshot")
        self._begun = 0  # the update of the last one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._writing.__exit__(*error)

    def write_if_due(self) -> None:
        self._writing.check()
        if self.folder.is_writer and self.run.update in self.updates and self._begun != self.run.update:
            self.begin()

    def finish(self) -> None:
        """Waits until the last snapshot is written."""
        self._writing.wait()

    def begin(self) -> None:
        """Starts to write a snapshot, once the previous one is finished."""
        run, posthoc = self.run, self.run.plan.config.posthoc
        assert posthoc is not None
        self._begun = run.update
        averages = zip(posthoc.kwargs["sigma_rels"], posthoc_averages(run), strict=True)
        names = [name for name, _ in run.model.named_parameters()]
        facts = {
            "update": run.update,
            "end": run.update - posthoc.kwargs["start_update"],
            "of": identity_of(run.plan.config.to_dict()),
        }
        named = {width: dict(zip(names, average.shadow_params, strict=True)) for width, average in averages}
        self._writing.start(
            write_snapshot,
            snapshot_folder(self.path, run.update),
            on_host(named),
            posthoc.kwargs["dtype"],
            facts,
        )

    def rewind(self) -> None:
        """Removes snapshots of later updates than the current one, and warns of earlier ones that are lost."""
        self.finish()
        self._begun = 0
        if not self.folder.is_writer or not self.updates:
            return
        for path in snapshots_in(self.path):
            if update_of(path) > self.run.update:
                remove(path)
        inherited = (self.folder.read_record().get("run", {}).get("parent") or {}).get("update", 0)
        past = {update_of(path) for path in snapshots_in(self.path)}  # those of a parent have a spacing of their own
        past |= {update for update in self.updates if inherited < update <= self.run.update}
        if lost := [str(update) for update in sorted(past) if find_damage(snapshot_folder(self.path, update))]:
            warn(
                f"snapshots of the averages at updates {', '.join(lost)} are missing or damaged. Training resumes, since "
                "it does not need them; averages of other widths will be less exact."
            )


def posthoc_averages(run: RunState) -> list[EMA]:
    """The averages of which snapshots are taken."""
    first = 0
    for form in run.config.given_ema_forms:
        if form.is_posthoc:
            return run.averages[first : first + len(form.tracks)]
        first += len(form.tracks)
    return []
