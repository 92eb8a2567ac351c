"""Interruption of a study: it is saved, and the message says how to resume it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import Interrupted, continued_by
from ...core.processes import interrupts_raised


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
