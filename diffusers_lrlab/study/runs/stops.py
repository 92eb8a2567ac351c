"""How a study stops before its end, and what it says then."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import DiskFull, Interrupted, LabError
from ...core.signals import interrupts_raised


class StudyInterrupted(Interrupted):
    """A study that was asked to stop (by signal 2, Ctrl-C, or 15, SIGTERM) and has saved itself."""

    def __init__(self, signal_number: int, folder: Path):
        super().__init__(signal_number, folder)
        self.args = (f"Stopped. Give the same command again to go on: everything that is done is in {str(folder)!r}.",)


@contextmanager
def stops_explained(folder: Path) -> Iterator[None]:
    """Says how a study goes on after SIGINT, SIGTERM or a full disk inside this block, whichever part of it notices."""
    try:
        with interrupts_raised(lambda number: StudyInterrupted(number, folder)):
            yield
    except Interrupted as interruption:
        raise StudyInterrupted(interruption.signal_number, folder) from None
    except DiskFull as full:
        raise LabError(f"{full.event} then give the same command again to go on: what is done is kept.") from full
