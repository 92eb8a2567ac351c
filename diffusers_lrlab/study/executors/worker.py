"""Executes jobs in a worker, with the executors of the main process, and returns their results."""

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from ...core.environment import asked_threads
from ...core.errors import Interrupted, LabError, is_out_of_memory
from ...core.plugins import load_plugins
from ...core.registered import registered_code_located
from ...training.prepare import keep_freed_memory
from ..runs.context import StudyContext
from ..runs.precision import products_in
from ..runs.progress import MEASURED, UPDATES, StudyProgress
from ..runs.results import StudyFolder
from ..runs.stops import stops_explained
from ..spec.spec import RunSpec

# How a job may end. A lost worker returns nothing; a refused job would be refused again.
DONE, STOPPED, NO_MEMORY, REFUSED, FAILED, LOST = "done", "stopped", "no memory", "refused", "failed", "lost"
_BUSY_SHARE = 0.05  # of a processor core; a process below it is waiting
Report = Callable[[str, Any], None]  # a topic (a counter of the job, "log" or "alive"), and its value


@dataclass(frozen=True)
class Setup:
    """Settings of a worker, common to all of its jobs."""

    folder: Path
    precision: str
    plugins: str  # as --import takes them
    num_threads: int = 1


def share_cores(num_workers: int | None, cores: int, gpus: int) -> tuple[int, int]:
    """The number of workers (by default one for each GPU, or else for each core), and the threads of each."""
    asked = asked_threads()
    num_workers = num_workers or gpus or max(1, cores // (asked or 1))
    return num_workers, asked or max(1, cores // num_workers)


@dataclass
class Job:
    """A run or a stack for one worker, with a function of `EXECUTORS`."""

    execute: Callable[[list[RunSpec], StudyContext], None]
    specs: list[RunSpec]
    done: set[str] = field(default_factory=set)  # ids of those that have results
    tries: int = 0
    number: int = field(default_factory=count().__next__)


Result = tuple[RunSpec, dict[str, Any], bytes | None]  # a run with its record and its weights


@dataclass
class Outcome:
    """The results of a job, which may have ended early, and checkpoints that can be removed."""

    results: list[Result]
    ended: str
    text: str = ""
    counts: dict[str, float] = field(default_factory=dict)  # by counter of [`StudyProgress`]
    discarded: list[Path] = field(default_factory=list)


class _Folder(StudyFolder):
    """The folder for checkpoints: the study's, or a temporary one if that is not visible on this node."""

    def __init__(self, path: Path):
        self.is_shared = (path / "spec.yaml").is_file()
        self._own = None if self.is_shared else tempfile.TemporaryDirectory(prefix="lrlab-study-")
        super().__init__(path if self._own is None else Path(self._own.name))
        self.done: set[str] = set()

    def missing(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        return [spec for spec in specs if spec.id not in self.done]


class _Progress(StudyProgress):
    """Reports to the main process."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.report: Report = lambda *_: None
        self.counts, self._told_at = dict.fromkeys((UPDATES, MEASURED), 0.0), 0.0

    def log(self, text: str) -> None:
        self.report("log", text[:1000])  # fits into a pipe

    def advance(self, amount: float, counter: str = UPDATES) -> None:
        self.counts[counter] += amount
        if time.monotonic() - self._told_at > 0.2:
            self._told_at = time.monotonic()
            self.report(counter, self.counts[counter])


class _WorkerStudy(StudyContext):
    """A study whose results are returned, not written."""

    folder: _Folder
    progress: _Progress

    def __init__(self, setup: Setup):
        super().__init__(_Folder(setup.folder), precision=setup.precision)
        self.progress = _Progress()

    def begin(self, job: Job, report: Report) -> None:
        self.stack_size, self.folder.done = len(job.specs), set(job.done)
        self.results: list[Result] = []
        self.discarded: list[Path] = []
        self.progress.report, self.progress.counts = report, dict.fromkeys(self.progress.counts, 0.0)

    def keep(self, spec: RunSpec, record: dict[str, Any], weights: bytes | None) -> None:
        self.results.append((spec, record, weights))
        self.folder.done.add(spec.id)

    def discard(self, *paths: Path) -> None:
        if self.folder.is_shared:  # only once the results are written
            self.discarded += paths
        else:
            super().discard(*paths)


_studies: dict[Setup, _WorkerStudy] = {}  # data are loaded once for all jobs of this process


def do_job(setup: Setup, job: Job, report: Report) -> Outcome:
    """Executes a job in the main thread of this process; errors are returned in its outcome."""
    report("alive", None)
    study: _WorkerStudy | None = None
    ended, text = DONE, ""
    try:
        with stops_explained(setup.folder), registered_code_located():
            study = _studies.get(setup) or _begin(setup)
            study.begin(job, report)
            with products_in(setup.precision, study.device):
                job.execute(job.specs, study)
    except Interrupted as stop:
        ended, text = STOPPED, f"it got signal {stop.signal_number}"
    except LabError as error:
        ended, text = REFUSED, str(error)
    except Exception as error:
        ended = NO_MEMORY if is_out_of_memory(error) else FAILED
        text = str(error).partition("\n")[0] if ended == NO_MEMORY else traceback.format_exc()
    if ended == NO_MEMORY:
        clear_device_cache(garbage_collection=True)
    if study is None:
        return Outcome([], ended, text)
    return Outcome(study.results, ended, text, study.progress.counts, study.discarded)


def _begin(setup: Setup) -> _WorkerStudy:
    os.environ["OMP_NUM_THREADS"] = str(setup.num_threads)  # which single runs read
    load_plugins(setup.plugins)
    study = _WorkerStudy(setup)
    if study.device.type == "cpu":
        torch.set_num_threads(setup.num_threads)
        keep_freed_memory()
    threading.Thread(target=_watch, args=(study.progress,), daemon=True).start()
    _studies[setup] = study
    return study


def _watch(progress: _Progress) -> None:
    """Reports every second in which this process used CPU time; without reports it counts as hung."""
    used = time.process_time()
    while True:
        time.sleep(1)
        if time.process_time() - used > _BUSY_SHARE:
            progress.report("alive", None)
        used = time.process_time()
