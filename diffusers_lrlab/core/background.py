"""Writing in a thread while training continues."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from typing_extensions import Self


class BackgroundWrite:
    """
    One call at a time in a thread. Errors of the thread are raised by the next method; a `with` block waits at its end.
    """

    _pending: Future[None] | None = None

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with suppress(*(() if kind is None else (Exception,))):  # must not hide the error that ended the run
            self.wait()

    def start(self, call: Callable[..., None], *arguments: Any) -> None:
        self.wait()
        executor = ThreadPoolExecutor(1, self.name)
        self._pending = executor.submit(call, *arguments)
        executor.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        return self._pending is None or self._pending.done()

    def check(self) -> None:
        """Raises an error of the thread, if there was one."""
        if self.is_done:
            self.wait()

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
