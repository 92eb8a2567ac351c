"""A job in a worker: one stack or one run, written into the folder of the study."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ...core.environment import asked_threads
from ...core.errors import Interrupted, LabError, is_out_of_memory
from ...core.plugins import load_plugins
from ...core.registered import registered_code_located
from ...training.prepare import keep_freed_memory
from ..runs.context import StudyContext
from ..runs.precision import products_in
from ..runs.progress import StudyProgress
from ..runs.results import StudyFolder
from ..runs.stops import stops_explained
from ..spec.spec import RunSpec

DONE, STOPPED, REFUSED, FAILED = "done", "stopped", "refused", "failed"  # how a job may end
Outcome = tuple[str, str]  # how it ended, and the text of its error


@dataclass(frozen=True)
class Setup:
    """Settings of a worker, common to all of its jobs."""

    folder: Path
    precision: str
    plugins: str  # as --import takes them
    num_threads: int = 1


class Job(NamedTuple):
    """A run or a stack for one worker, with a function of `EXECUTORS`."""

    execute: Callable[[list[RunSpec], StudyContext], None]
    specs: list[RunSpec]


def share_cores(num_workers: int | None, cores: int, gpus: int) -> tuple[int, int]:
    """The number of workers (by default one for each GPU, or else for each core), and the threads of each."""
    asked = asked_threads()
    num_workers = num_workers or gpus or max(1, cores // (asked or 1))
    return num_workers, asked or max(1, cores // num_workers)


_studies: dict[Setup, StudyContext] = {}  # data are loaded once for all jobs of this process
_is_stopped = False


def stop(*_: object) -> None:
    """Makes this process return its later jobs undone; a handler of signals."""
    global _is_stopped
    _is_stopped = True


def do_job(setup: Setup, job: Job) -> Outcome:
    """Executes a job in the main thread of this process. Errors are returned, as not all of them can be pickled."""
    if _is_stopped:
        return STOPPED, "A worker was stopped"
    try:
        with stops_explained(setup.folder), registered_code_located():
            if not (setup.folder / "spec.yaml").is_file():
                raise LabError(f"--out {str(setup.folder)!r}: every node needs this folder. Give one on a shared disk.")
            study = _studies.get(setup) or _begin(setup)
            study.stack_size = len(job.specs)
            with products_in(setup.precision, study.device):
                job.execute(job.specs, study)
    except Interrupted as interruption:
        stop()
        return STOPPED, f"A worker got signal {interruption.signal_number}"
    except LabError as error:
        return REFUSED, str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return STOPPED, f"A worker ran out of memory ({str(error).partition(chr(10))[0]})"
        return FAILED, traceback.format_exc()
    return DONE, ""


def _begin(setup: Setup) -> StudyContext:
    os.environ["OMP_NUM_THREADS"] = str(setup.num_threads)  # which single runs read
    load_plugins(setup.plugins)
    study = StudyContext(StudyFolder(setup.folder), quiet=True, precision=setup.precision)
    study.progress = StudyProgress()  # logs; the main process has the bars
    if study.device.type == "cpu":
        torch.set_num_threads(setup.num_threads)
        keep_freed_memory()
    _studies[setup] = study
    return study
