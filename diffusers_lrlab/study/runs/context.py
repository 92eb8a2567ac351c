"""The context that all runs of a study share: its folder, the device, loaded data, and plans."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from ...core.environment import describe_environment
from ...core.errors import LabError, warn
from ...core.files import remove
from ...core.words import agreeing, counted
from ...data.loading import TrainingData
from ...training.config import DataConfig
from ...training.kinds import kind_of
from ...training.plan import Plan, make_plan
from ...training.trackers import scalars_of, start_trackers
from ..kind_settings import settings_of
from ..spec.spec import RunSpec
from .precision import check_precision, precision_warning
from .progress import StudyProgress
from .results import StudyFolder

_STACK_SIZES = {"cpu": 20, "cuda": 256}  # not measured on a GPU


class StudyContext:
    """
    Folder, device, progress and data of a study.

    `stack_size` limits the runs that are computed side by side; `precision` is a name in `PRECISIONS`. Raises a `LabError`
    for a precision that this machine lacks.
    """

    def __init__(self, folder: StudyFolder, stack_size: int | None = None, quiet: bool = False, precision: str = "fp32"):
        self.folder, self.precision, self.progress = folder, precision, StudyProgress(quiet)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.stack_size = stack_size or _STACK_SIZES[self.device.type]
        check_precision(precision, self.device)
        if not quiet and (warning := precision_warning(precision, self.device)):
            warn(warning)
        self.meta = describe_environment()
        self._loaded: dict[Any, TrainingData] = {}

    def data(self, spec: RunSpec) -> TrainingData:
        """The data of a run, loaded once for all runs that have the same."""
        config = spec.config
        fields = [getattr(config, field.name) for field in dataclasses.fields(DataConfig)]
        is_shared = settings_of(config).shares_data and not config.streaming
        key = (repr(fields), 0 if is_shared else config.seed)
        if key not in self._loaded:
            self._loaded[key] = kind_of(config).load_data(config, 1)
        return self._loaded[key]

    def plan(self, spec: RunSpec, output_dir: str = "run") -> tuple[Plan, TrainingData]:
        """The plan of a run and its data."""
        # Sample images from the middle of a run would be removed with its folder.
        config = dataclasses.replace(spec.config, output_dir=output_dir, save_images_epochs=sys.maxsize)
        data = self.data(spec)
        try:
            return make_plan(config, data, spec.model, measures_in_full=True, start=spec.start), data
        except LabError as error:
            raise LabError(f"In the arm {spec.arm!r} on {spec.dataset!r}: {error}") from None

    def keep(self, spec: RunSpec, record: dict[str, Any]) -> None:
        """Writes the record of a run and shows it."""
        self.folder.write(record)
        _show_in_trackers(self.folder.path, spec, record)
        self.progress.finished(spec)

    def discard(self, *paths: Path) -> None:
        """Removes checkpoints of finished runs."""
        for path in paths:
            if path.exists():
                remove(path)

    def drop_outdated(self, specs: list[RunSpec]) -> None:
        """Removes and logs results whose data have changed."""
        outdated = []
        for result, spec in ((self.folder.read(spec.id), spec) for spec in specs):
            if result is not None and result.record["train"].get("data_fingerprint") != self.data(spec).fingerprint:
                self.folder.run_file(spec.id).unlink()
                outdated.append(spec.id)
        if outdated:
            these = agreeing(len(outdated), "This run is", "These runs are")
            changed = f"The data of {counted(len(outdated), 'run')} have changed."
            self.progress.log(f"{changed} {these} computed again: {', '.join(outdated)}.")


def _show_in_trackers(study_folder: Path, spec: RunSpec, record: dict[str, Any]) -> None:
    """Logs a finished run to the trackers of `logger`, in the group of its study; stacked runs finish together."""
    about = {name: getattr(spec, name) for name in ("arm", "dataset", "seed", "stage")}
    folder = study_folder.resolve()
    trackers = start_trackers(spec.config, folder / "logs" / spec.id, spec.id, folder.name, **about)
    run, rows = record["train"], dict[int, dict[str, float]]()
    for columns in record["curves"].values():
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            rows.setdefault(row["update"], {}).update(row)
    for tracker in trackers:
        for update, row in sorted(rows.items()):  # most trackers require increasing updates
            tracker.log(scalars_of(row), step=update)
        tracker.log({f"results/{name}": value for name, value in run["results"].items()}, step=run["updates_done"])
        tracker.finish()
