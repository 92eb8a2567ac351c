"""Limits of the Hub's client: how long it waits for an answer; and removal of tokens from its errors."""

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

# The client itself retries for ever. These limits are multiples of its HF_HUB_DOWNLOAD_TIMEOUT, 10 s unless it is set.
_ONE_CALL, _ALL_CALLS = 2, 5
_RETRY_WITHIN = 10  # seconds within which the client retries
_SLOWEST = 10_000  # bytes a second, the slowest acceptable transfer
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?<=Bearer )\S+")


class HubSilent(LabError):
    """The Hub timed out; not retried."""


def seconds_for_one() -> float:
    """Longest silence of the Hub within one call, in seconds."""
    from huggingface_hub import constants

    return _ONE_CALL * constants.HF_HUB_DOWNLOAD_TIMEOUT


def seconds_for_all() -> float:
    """Longest silence of the Hub over all retries, in seconds."""
    from huggingface_hub import constants

    return _ALL_CALLS * constants.HF_HUB_DOWNLOAD_TIMEOUT


class _StallTimeout:
    """
    The time since the first request without a complete response, less the time that a slow connection needs for the bytes
    sent and received since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._stopped = 0.0  # when the last request ended

    def begins(self) -> float:
        """Starts the timer, unless this is a retry of an unanswered request; returns the seconds left."""
        with self._lock:
            now = time.monotonic()
            if self._since is None or now - self._stopped > _RETRY_WITHIN:
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
        """Resets the timer; returns the seconds so far."""
        passed = seconds_for_all() - self.left()
        with self._lock:
            self._since = None
        return passed


STALL_TIMEOUT = _StallTimeout()


def _silent() -> HubSilent:
    from huggingface_hub import constants

    longer = 2 * constants.HF_HUB_DOWNLOAD_TIMEOUT
    return HubSilent(
        f"The Hub ({constants.ENDPOINT}) has sent almost nothing for {seconds_for_all():g} s. Check the "
        f"network and HF_ENDPOINT, or try again later. To wait twice as long, set HF_HUB_DOWNLOAD_TIMEOUT={longer}."
    )


def limit_waiting() -> None:
    """Makes the client of this process give up on a silent Hub. Call it before the client is first used."""
    from huggingface_hub.utils import _http

    made = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
    if made is None:  # huggingface_hub before 1, with another HTTP library
        _limit_sessions()
    elif not isinstance(made, _LimitedFactory):  # the client's own, or the user's, for a proxy
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
    elif (asked_wait(response.headers) or 0) > _RETRY_WITHIN:
        response.read()
        hf_raise_for_status(response)  # otherwise the client silently waits as long as the server asks


def asked_wait(headers: Any) -> float | None:
    """The wait in seconds that the headers of a response ask for."""
    for name, pattern in (("Retry-After", r"\s*(\d+(?:\.\d+)?)\s*$"), ("RateLimit", r".*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")):
        if found := re.match(pattern, headers.get(name) or ""):
            return float(found[1])
    return None


def _counted(stream: Any, is_answer: bool) -> Any:
    """A body whose transfer extends the time limit; a complete response resets it."""

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
    """The class of synchronous bodies in the HTTP library that the client uses, which depends on its version."""
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
    """A message without these tokens, the one in use, and anything that looks like a token."""
    from huggingface_hub import get_token

    for secret in {*tokens, get_token(), os.environ.get("HF_TOKEN")} - {None, ""}:
        text = text.replace(str(secret), "...")
    return _TOKEN.sub("...", text).strip()
