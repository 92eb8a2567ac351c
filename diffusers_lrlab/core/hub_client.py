"""The client of the Hub with limits: how long it waits for an answer, and what may be shown of its errors."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from .errors import LabError

# The client itself waits for ever. Seconds are multiples of its HF_HUB_DOWNLOAD_TIMEOUT, 10 unless it is set.
_FOR_ONE, _FOR_ALL = 2, 5
_SOON = 10  # seconds within which the client tries again
_SLOWEST = 10_000  # bytes a second that a transfer may take its time for
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?<=Bearer )\S+")


class HubSilent(LabError):
    """The Hub has not answered for so long that it is not asked again."""


def seconds_for_one() -> float:
    """Seconds that the Hub may be silent within one call."""
    from huggingface_hub import constants

    return _FOR_ONE * constants.HF_HUB_DOWNLOAD_TIMEOUT


def seconds_for_all() -> float:
    """Seconds that the Hub may be silent, however often it is asked again."""
    from huggingface_hub import constants

    return _FOR_ALL * constants.HF_HUB_DOWNLOAD_TIMEOUT


class _StallTimeout:
    """
    The seconds since the first request that no whole answer has followed. What is sent and received meanwhile takes away as
    many as a slow connection needs for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._stopped = 0.0  # when the last request was done or given up

    def begins(self) -> float:
        """Counts from this request on, unless it soon follows one without an answer; returns the seconds that are left."""
        with self._lock:
            now = time.monotonic()
            if self._since is None or now - self._stopped > _SOON:
                self._since = now
            self._stopped = math.inf
        return self.left()

    def stops(self) -> None:
        with self._lock:
            self._stopped = time.monotonic()

    def moved(self, num_bytes: int) -> None:
        with self._lock:
            if self._since is not None:
                self._since = min(self._since + num_bytes / _SLOWEST, time.monotonic())
        if self.left() <= 0:
            raise _silent()

    def left(self) -> float:
        with self._lock:
            return seconds_for_all() - (0.0 if self._since is None else time.monotonic() - self._since)

    def ends(self) -> float:
        """Counts anew from the next request on; returns the seconds so far."""
        passed = seconds_for_all() - self.left()
        with self._lock:
            self._since = None
        return passed


STALL_TIMEOUT = _StallTimeout()


def _silent() -> HubSilent:
    from huggingface_hub import constants

    longer = 2 * constants.HF_HUB_DOWNLOAD_TIMEOUT
    return HubSilent(
        f"The Hub ({constants.ENDPOINT}) has sent nothing, or next to nothing, for {seconds_for_all():g} s. Check the "
        f"network and HF_ENDPOINT, or try again later. To wait twice as long, set HF_HUB_DOWNLOAD_TIMEOUT={longer}."
    )


def limit_waiting() -> None:
    """Makes the client of this process give up on a Hub that is silent; before the first call to it."""
    from huggingface_hub.utils import _http

    made = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
    if made is None:  # huggingface_hub before 1, with another HTTP library
        _limit_sessions()
    elif not isinstance(made, _LimitedFactory):  # that of the client, or the user's own, for a proxy
        _http.set_client_factory(_LimitedFactory(made))


class _LimitedFactory:
    def __init__(self, make: Any):
        self.make = make

    def __call__(self) -> Any:
        client = self.make()
        hooks = client.event_hooks
        more = {"request": [*hooks["request"], _before], "response": [*hooks["response"], _after]}
        client.event_hooks = {**hooks, **more}
        send = client.send

        def sent(*given: Any, **how: Any) -> Any:
            try:
                return send(*given, **how)
            finally:
                STALL_TIMEOUT.stops()

        client.send = sent
        return client


def _before(request: Any) -> None:
    left = STALL_TIMEOUT.begins()
    if left <= 0:
        raise _silent()
    asked = request.extensions.get("timeout") or {}
    waits = {phase: min(asked.get(phase) or seconds_for_one(), left) for phase in ("connect", "read", "write", "pool")}
    request.extensions = {**request.extensions, "timeout": waits}
    request.stream = _counted(request.stream, is_answer=False)


def _after(response: Any) -> None:
    from huggingface_hub.utils import hf_raise_for_status

    if response.status_code != 429 and response.status_code < 500:
        response.stream = _counted(response.stream, is_answer=True)
    elif (asked_wait(response.headers) or 0) > _SOON:
        response.read()
        hf_raise_for_status(response)  # else the client waits as long as it is asked to, without a word


def asked_wait(headers: Any) -> float | None:
    """Seconds that an answer asks to wait for."""
    for name, pattern in (("Retry-After", r"\s*(\d+(?:\.\d+)?)\s*$"), ("RateLimit", r".*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")):
        if found := re.match(pattern, headers.get(name) or ""):
            return float(found[1])
    return None


def _counted(stream: Any, is_answer: bool) -> Any:
    """A body that counts as it moves; the whole of an answer ends the silence."""

    class Counted(_base_of_streams(type(stream))):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            try:
                for part in stream:
                    STALL_TIMEOUT.moved(len(part))
                    yield part
                if is_answer:
                    STALL_TIMEOUT.ends()
            finally:
                STALL_TIMEOUT.stops()

        def close(self) -> None:
            stream.close()

    return Counted()


@functools.cache
def _base_of_streams(stream_class: type) -> type:
    """What the HTTP library calls a synchronous body, whose name has changed with that of the library."""
    return next(base for base in stream_class.__mro__ if base.__name__ == "SyncByteStream")


@functools.cache
def _limit_sessions() -> None:
    from huggingface_hub import configure_http_backend
    from huggingface_hub.utils import _http

    def limited() -> Any:
        session = vars(_http)["_default_backend_factory"]()
        request = session.request
        session.request = lambda *given, timeout=None, **more: request(*given, timeout=timeout or seconds_for_one(), **more)
        return session

    configure_http_backend(limited)


def without_tokens(text: str, *tokens: str | None) -> str:
    """A message of the Hub or of its client without these tokens, the one in use, and what looks like another."""
    from huggingface_hub import get_token

    for secret in {*tokens, get_token(), os.environ.get("HF_TOKEN")} - {None, ""}:
        text = text.replace(str(secret), "...")
    return _TOKEN.sub("...", text).strip()
