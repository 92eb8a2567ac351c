"""What all runs of a study share: its folder, the device, loaded data and plans, and the progress that it shows."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from ..core.environment import describe_environment, is_watched
from ..core.errors import Interrupted, LabError, continued_by
from ..core.program import freeze_imports, interrupts_raised
from ..core.words import agreeing, counted
from ..data.loading import TrainingData
from ..training.config import DataConfig
from ..training.kinds import kind_of
from ..training.plan import Plan, make_plan
from ..training.trackers import scalars_of, start_trackers
from .kind_settings import settings_of
from .results import StudyFolder
from .spec.spec import RunSpec

T = TypeVar("T")
_STACK_SIZES = {"cpu": 20, "cuda": 256}  # not measured on a GPU


class StudyContext:
    """
    Folder, device, progress and data of a study.

    `executor` is one that was asked for, and `stack_size` limits the runs that are computed side by side.
    """

    def __init__(self, folder: StudyFolder, stack_size: int | None = None, executor: str | None = None, quiet: bool = False):
        freeze_imports()
        self.folder, self.executor, self.progress = folder, executor, StudyProgress(quiet)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.stack_size = stack_size or _STACK_SIZES[self.device.type]
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


# --- progress and interruptions ----------------------------------------------------------------------------------------


class StudyProgress:
    """The progress bars of a study, over the updates of all runs and over measured runs; `quiet` prints nothing."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self._updates, self._measured = tqdm(disable=True), tqdm(disable=True)  # nothing is shown outside `bar`
        self._shown: dict[str, Any] = {"disable": quiet, "mininterval": 0.2 if is_watched() else 30}

    def log(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(text)

    @contextmanager
    def bar(self, specs: list[RunSpec], description: str) -> Iterator[None]:
        """Shows the two bars for these runs inside this block."""
        num_updates = sum(spec.config.max_train_steps or 0 for spec in specs) or None
        with (
            tqdm(total=num_updates, desc=description, unit="update", unit_scale=True, **self._shown) as self._updates,
            tqdm(total=len(specs), desc="measured", unit="run", **self._shown) as self._measured,
        ):
            yield

    def steps(self, items: list[T], description: str) -> Iterator[T]:
        """Yields the items with a progress bar of their own, for work that is not counted in updates."""
        yield from tqdm(items, description, **self._shown)

    def advance(self, num_updates: int) -> None:
        self._updates.update(num_updates)

    def finished(self, spec: RunSpec) -> None:
        """Counts a measured run, and shows which result was written last."""
        self._measured.update(1)
        self._updates.set_postfix_str(f"last: {spec.arm} on {spec.dataset}, seed {spec.seed}")


class StudyInterrupted(Interrupted):
    """A study was stopped by SIGINT (Ctrl-C) or SIGTERM and has saved its state."""

    def __init__(self, signal_number: int, folder: Path):
        super().__init__(signal_number, folder)
        self.args = (f"Stopped. The same command resumes the study: everything done so far is in {str(folder)!r}.",)


@contextmanager
def stops_explained(folder: Path) -> Iterator[None]:
    """Turns SIGINT and SIGTERM inside this block into errors that say, as others do, how to resume the study."""
    try:
        again = continued_by("give the same command again: finished runs are kept")
        with again, interrupts_raised(lambda number: StudyInterrupted(number, folder)):
            yield
    except Interrupted as interruption:
        raise StudyInterrupted(interruption.signal_number, folder) from None
