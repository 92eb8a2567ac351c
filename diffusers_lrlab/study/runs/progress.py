"""What a running study shows: bars over updates and measured runs, log lines above them, and how to resume it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from diffusers_lrlab.core.program import interrupts_raised

from ...core.environment import is_watched
from ...core.errors import Interrupted, continued_by
from ..spec.spec import RunSpec

T = TypeVar("T")
UPDATES, MEASURED = "updates", "measured"  # counters: updates of all runs, and measured runs, which may be fractional


class StudyProgress:
    """The progress bars of a study; `quiet` prints nothing."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self._bars = {name: tqdm(disable=True) for name in (UPDATES, MEASURED)}  # nothing is shown outside `bar`

    def log(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(text)

    @contextmanager
    def bar(self, specs: list[RunSpec], description: str) -> Iterator[None]:
        """Shows two bars inside this block: over the updates of these runs, and over the runs that are measured."""
        shown: dict[str, Any] = {"disable": self.quiet, "mininterval": 0.2 if is_watched() else 30}
        num_updates = sum(spec.config.max_train_steps or 0 for spec in specs) or None
        layout = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} [{elapsed}<{remaining}]"
        with (
            tqdm(total=num_updates, desc=description, unit="update", unit_scale=True, **shown) as updates,
            tqdm(total=len(specs), desc="measured", bar_format=layout, **shown) as measured,
        ):
            self._bars = {UPDATES: updates, MEASURED: measured}
            yield

    def steps(self, items: list[T], description: str) -> Iterator[T]:
        """Yields the items with a progress bar of their own, for work that is not counted in updates."""
        yield from tqdm(items, description, disable=self.quiet, mininterval=0.2 if is_watched() else 30)

    def advance(self, amount: float, counter: str = UPDATES) -> None:
        bar = self._bars[counter]
        # Rounding of parts of a run may exceed the total, which tqdm would show.
        bar.update(amount if counter == UPDATES else min(amount, (bar.total or 0) - bar.n))

    def finished(self, spec: RunSpec) -> None:
        """Shows which result was written last."""
        self._bars[UPDATES].set_postfix_str(f"last: {spec.arm} on {spec.dataset}, seed {spec.seed}")


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
