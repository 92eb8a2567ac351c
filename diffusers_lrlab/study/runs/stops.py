"""Interruption of a study: it is saved, and the message says how to resume it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import DiskFull, Interrupted, LabError
from ...core.signals import interrupts_raised


class StudyInterrupted(Interrupted):
    """A study was stopped by SIGINT (Ctrl-C) or SIGTERM and has saved its state."""

    def __init__(self, signal_number: int, folder: Path):
        super().__init__(signal_number, folder)
        self.args = (f"Stopped. The same command resumes the study: everything done so far is in {str(folder)!r}.",)


@contextmanager
def stops_explained(folder: Path) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and a full disk inside this block into errors that say how to resume the study."""
    try:
        with interrupts_raised(lambda number: StudyInterrupted(number, folder)):
            yield
    except Interrupted as interruption:
        raise StudyInterrupted(interruption.signal_number, folder) from None
    except DiskFull as full:
        raise LabError(f"{full.event} then give the same command again: finished runs are kept.") from full
