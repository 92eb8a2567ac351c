"""The Hub as seen from here: whose token it is, what it may write, and what the Hub's answers mean."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import LabError
from ..core.files import FULL

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_LONGEST_WAIT = 120  # seconds; a Hub that asks for more patience is told to the user instead
_MEANINGS = {
    401: "The Hub does not accept the token: it is wrong, or it has expired.",
    403: "The Hub refuses: this token has no right to write there.",
    404: "There is no such repository or revision on the Hub, or this token may not see it.",
    409: "The repository is in another state than was expected.",
    412: "Somebody else has committed to the repository in the meantime.",
    413: "The Hub takes no files of this size.",
    429: "The Hub asks for patience: too many requests.",
}


@dataclass(frozen=True)
class Target:
    """
    Where something is to go.

    Args:
        repo_id (`str`): "USER/NAME"; [`check_can_write`] puts the user in front of a bare name.
        repo_type (`str`): "model", "dataset" or "space".
        private (`bool`): Whether the repository is made private if it is new.
        revision (`str`): The branch, which is made if there is none.
        create_pr (`bool`): Whether to propose the change instead of making it.
        token (`str`, *optional*): The one of `HF_TOKEN` or `hf auth login` if not given.
        asked_by (`str`): What the user gave to upload, for messages.
        id_option (`str`): What the user gave `repo_id` by.
    """

    repo_id: str
    repo_type: str = "model"
    private: bool = False
    revision: str = "main"
    create_pr: bool = False
    token: str | None = field(default=None, repr=False)
    asked_by: str = "lrlab push"
    id_option: str = "--repo_id"

    @property
    def api(self) -> HfApi:
        """A client with the token."""
        from huggingface_hub import HfApi, get_token

        return HfApi(token=self.token or get_token())

    @property
    def where(self) -> dict[str, Any]:
        """What most calls of the client take."""
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}


def check_can_write(target: Target, dry_run: bool = False) -> Target:
    """
    Makes sure, before any work, that something can be uploaded; makes the repository and the branch if they are missing.

    Args:
        target ([`Target`]): Where to.
        dry_run (`bool`): Whether nothing may be made.

    Returns:
        [`Target`]: with a complete id.

    Raises:
        LabError: without a token, with one that the Hub does not accept or that may only read, and with an id that is not
            valid or belongs to somebody else.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id

    if not (target.token or get_token()):
        raise LabError(
            f"{target.asked_by} needs a token with the right to write. Run `hf auth login`, set HF_TOKEN, or pass "
            "--hub_token to the training script."
        )
    try:
        validate_repo_id(target.repo_id)
    except ValueError as error:
        raise LabError(f"{target.id_option} {target.repo_id!r} is not a valid id: {error}") from None
    api = target.api
    with hub_errors(target):
        who = patiently(api.whoami, "Asking whose token it is", attempts=2)
        token_name, role = _describe_token(who)
        if role == "read":
            raise LabError(
                f"{target.asked_by} needs the right to write, and the token {token_name!r} of {who['name']!r} may only "
                "read. Make one of the type 'write' in the settings of the Hub, then run `hf auth login` or set HF_TOKEN."
            )
        if "/" not in target.repo_id:
            target = dataclasses.replace(target, repo_id=f"{who['name']}/{target.repo_id}")
        if dry_run:
            return target
        patiently(lambda: _make_ready(target), "Looking at the repository")
    return target


def _make_ready(target: Target) -> None:
    """Makes repository and branch if they are missing, and asks for the right to write."""
    api = target.api
    if target.create_pr:
        api.repo_info(**target.where)  # everybody may propose changes to what is there
        return
    extra = {"space_sdk": "static"} if target.repo_type == "space" else {}
    api.create_repo(**target.where, private=target.private or None, exist_ok=True, **extra)  # type: ignore[arg-type]
    # One that is there already is no sign that one may write to it.
    api.auth_check(**target.where, write=True)
    if target.private and not api.repo_info(**target.where).private:
        raise LabError(
            f"{target.id_option} {target.repo_id!r} is there already, and public. Make it private in its settings on the "
            "Hub, or leave out the option that asks for a private one."
        )
    if target.revision != "main":
        api.create_branch(**target.where, branch=target.revision, exist_ok=True)


def _describe_token(who: dict[str, Any]) -> tuple[str, str | None]:
    """Name and role of the token that `whoami` was asked with."""
    token = (who.get("auth") or {}).get("accessToken") or {}
    return token.get("displayName", "in use"), token.get("role")


@contextmanager
def hub_errors(target: Target) -> Iterator[None]:
    """Turns what the client raises into a `LabError` that says what it means; no message holds the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except LabError:
        raise
    # A failed connection is an HTTPError in huggingface_hub 1 and later, an OSError before; storage raises RuntimeErrors.
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as raised:
        error = _cause(raised)
        if _is_local(error):
            raise
        raise LabError(explain(error, target)) from None
    except ValueError as error:  # the client's own checks, such as that of a card's metadata, or an answer that is no JSON
        text = f"{_without(str(error), target.token)} ({target.asked_by}, {target.repo_id!r})"
        is_foreign = isinstance(error, json.JSONDecodeError)
        raise LabError("What answered is not the Hub. Check the network and HF_ENDPOINT: " * is_foreign + text) from None


def explain(error: BaseException, target: Target) -> str:
    """One message for an error of the client: what happened, and what to do."""
    status = status_of(error)
    text = _without(str(error), target.token)
    if status is None:
        return (
            f"The Hub cannot be reached for {target.asked_by}: {text}\nCheck the network and HF_ENDPOINT, or upload later."
        )
    meaning = _MEANINGS.get(status, "The Hub has trouble of its own." if status >= 500 else "The Hub refuses.")
    remedy = {
        401: "The token comes from --hub_token, HF_TOKEN or `hf auth login`, in this order; an expired one needs a new one.",
        412: "Look at what is there, and push again.",
        429: "Wait, and push again.",
    }.get(status, f"Check {target.id_option} {target.repo_id!r}, and the token and its rights.")
    if status >= 500:
        remedy = "Push again later."
    return f"{meaning} ({target.asked_by}, {target.repo_type} {target.repo_id!r}) {text}\n{remedy}"


def _without(text: str, token: str | None) -> str:
    """A message without any token in it."""
    from huggingface_hub import get_token

    for secret in {token, get_token()} - {None, ""}:
        text = text.replace(str(secret), "...")
    return text.strip()


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of the client is about, `None` if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def say(text: str) -> None:
    """Tells the user what is going on."""
    sys.stderr.write(text + "\n")


def patiently(action: Callable[[], T], doing: str, attempts: int = 4) -> T:
    """
    Does something on the Hub, and again after a while if the Hub is busy or the connection breaks.

    Args:
        action (`Callable`): May be called several times.
        doing (`str`): For messages.
        attempts (`int`): At most.

    Raises:
        What `action` raises the last time.
    """
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    for attempt in range(attempts):
        try:
            return action()
        except (HTTPError, OSError, RuntimeError) as raised:
            error = _cause(raised)
            status = status_of(error)
            passes = (status is None or status == 429 or status >= 500) and not isinstance(error, OfflineModeIsEnabled)
            wait = _asked_wait(error) or 2.0**attempt
            if not passes or attempt + 1 == attempts or wait > _LONGEST_WAIT or _is_local(error):
                raise
            what = "no answer" if status is None else f"status {status}"
            say(f"{doing}: {what} from the Hub; again in {wait:g} s ({attempt + 1} of {attempts - 1}).")
            time.sleep(wait)
    raise AssertionError("unreachable")


def _cause(error: BaseException) -> BaseException:
    """What is behind the RuntimeError that the client makes of errors of large files."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_local(error: BaseException) -> bool:
    """Whether a file of ours is the trouble, which no patience mends; the Hub's errors are OSErrors too."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in FULL)


def _asked_wait(error: BaseException) -> float | None:
    """Seconds of the answer's Retry-After."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        seconds = float(headers["Retry-After"])
    except (KeyError, ValueError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
