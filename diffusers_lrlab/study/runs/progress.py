"""What a user sees of a study while it runs: a bar over all updates, and lines above it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm.auto import tqdm

from ...core.environment import is_watched
from ..spec.spec import RunSpec

T = TypeVar("T")


class StudyProgress:
    """The progress bar of a study; `quiet` prints nothing."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self._bar = tqdm(disable=True)  # outside of `bar` nothing is shown

    def log(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self.quiet:
            tqdm.write(text)

    @contextmanager
    def bar(self, specs: list[RunSpec], description: str) -> Iterator[None]:
        """Shows a bar over the updates of these runs inside this block."""
        self._bar = tqdm(
            total=sum(spec.config.max_train_steps or 0 for spec in specs) or None,
            desc=description,
            unit="update",
            unit_scale=True,
            disable=self.quiet,
            mininterval=0.2 if is_watched() else 30,
        )
        with self._bar:
            yield

    def steps(self, items: list[T], description: str) -> Iterator[T]:
        """The items, with a bar of their own over them: for work that is not counted in updates."""
        yield from tqdm(items, description, disable=self.quiet, mininterval=0.2 if is_watched() else 30)

    def advance(self, updates: int) -> None:
        self._bar.update(updates)

    def finished(self, spec: RunSpec) -> None:
        """Shows that the result of a run is written."""
        self._bar.set_postfix_str(f"last: {spec.arm} on {spec.dataset}, seed {spec.seed}")
