"""Access to the Hub: tokens, the right to write, explanations of errors, retries."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import LabError, printable
from ..core.files import FULL
from ..core.hub_client import STALL_TIMEOUT, asked_wait, limit_waiting, seconds_for_all, seconds_for_one, without_tokens

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_LONGEST_WAIT = 120  # seconds of waiting between attempts; the Hub may ask for longer, which is an error
_MEANINGS = {
    401: "The Hub does not accept the token: it is wrong, or it has expired.",
    403: "The Hub refuses: this token may not write there.",
    404: "There is no such repository or revision on the Hub, or this token may not see it.",
    409: "The repository is not in the expected state.",
    412: "The repository has a newer commit than the one that this upload is based on.",
    413: "The Hub does not accept files of this size.",
    429: "The Hub limits requests, and there were too many.",
}
_REMEDIES = {
    401: "The token comes from --hub_token, HF_TOKEN or `hf auth login`, in this order; an expired one needs a new one.",
    412: "Look at what is there, and push again.",
    429: "Wait, and push again.",
}


@dataclass(frozen=True)
class Target:
    """
    A repository to upload to. Messages name `asked_by`, the command or option that uploads, and `id_option`, which gave the
    id.
    """

    repo_id: str  # [`check_can_write`] adds the user to a bare name
    repo_type: str = "model"  # or "dataset", "space"
    private: bool = False  # if it is new
    revision: str = "main"  # a branch, which is created if it is missing
    create_pr: bool = False
    token: str | None = field(default=None, repr=False)  # that of `HF_TOKEN` or `hf auth login` if not given
    asked_by: str = "lrlab push"
    id_option: str = "--repo_id"

    @property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi, get_token

        limit_waiting()
        return HfApi(token=self.token or get_token())

    @property
    def where(self) -> dict[str, Any]:
        """Arguments that most calls of the client take."""
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}


def check_can_write(target: Target, dry_run: bool = False) -> Target:
    """
    The target with a complete id. Raises a `LabError`, before any work, if nothing can be uploaded to it.

    Creates the repository and the branch if they are missing, unless this is a dry run.
    """
    from huggingface_hub import get_token

    if not (target.token or get_token()):
        raise LabError(f"{target.asked_by} needs a token with write permission. Run `hf auth login`, or set HF_TOKEN.")
    check_repo_id(target.repo_id, f"{target.id_option} ")
    with hub_errors(target):
        who = with_retries(target.api.whoami, "Asking whose token it is", attempts=2)
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise LabError(
                f"{target.asked_by} needs write permission, and the token {token.get('displayName', 'in use')!r} of "
                f"{who['name']!r} is read-only. Make one of the type 'write' in the settings of the Hub, then run `hf auth "
                "login` or set HF_TOKEN."
            )
        if "/" not in target.repo_id:
            target = dataclasses.replace(target, repo_id=f"{who['name']}/{target.repo_id}")
        if dry_run:
            return target
        with_retries(lambda: _make_ready(target), "Looking at the repository")
    return target


def check_repo_id(repo_id: str, called: str = "") -> None:
    """Raises a `LabError` for an id that the Hub would not accept."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise LabError(f"{called}{repo_id!r} is not a valid id: {error}") from None


def _make_ready(target: Target) -> None:
    """Creates repository and branch if they are missing, and checks the right to write."""
    api = target.api
    if target.create_pr:
        api.repo_info(**target.where)  # everybody may propose changes to an existing repository
        return
    extra = {"space_sdk": "static"} if target.repo_type == "space" else {}
    api.create_repo(**target.where, private=target.private or None, exist_ok=True, **extra)  # type: ignore[arg-type]
    _check_may_write(target, api)
    if target.private and not api.repo_info(**target.where).private:
        raise LabError(
            f"{target.id_option} {target.repo_id!r} exists and is public. Make it private in its settings on the "
            "Hub, or leave out the option that asks for a private one."
        )
    if target.revision != "main":
        api.create_branch(**target.where, branch=target.revision, exist_ok=True)


def _check_may_write(target: Target, api: HfApi) -> None:
    """Raises an error of the client without the right to write, which an existing repository need not give."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    # The client's own `auth_check` takes `write` only in newer versions.
    path = f"{api.endpoint}/api/{target.repo_type}s/{target.repo_id}/auth-check/write"
    hf_raise_for_status(get_session().get(path, headers=build_hf_headers(token=api.token)))


@contextmanager
def hub_errors(target: Target) -> Iterator[None]:
    """Turns errors of the client into a `LabError` that explains them; no message contains the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    # A failed connection is an HTTPError in huggingface_hub 1 and later, an OSError before; storage raises RuntimeErrors.
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as raised:
        error = _cause(raised)
        if _is_local(error):
            raise
        if isinstance(error, LabError):
            raise error from None
        raise LabError(explain(error, target)) from None
    except LabError:
        raise
    except ValueError as error:  # the client's own checks, such as of a card's metadata, or an answer that is not JSON
        is_foreign = isinstance(error, json.JSONDecodeError)
        what = "The answer is not from the Hub. Check the network and HF_ENDPOINT: " if is_foreign else ""
        raise LabError(f"{what}{without_tokens(str(error), target.token)} ({target.asked_by}, {target.repo_id!r})") from None


def explain(error: BaseException, target: Target) -> str:
    """An error of the client with its meaning and the remedy."""
    status = status_of(error)
    text = without_tokens(str(error), target.token)
    if status is None:
        what = f"The Hub cannot be reached for {target.asked_by}: {text}"
        limit = f"The limit is {seconds_for_one():g} s for an answer, which is twice HF_HUB_DOWNLOAD_TIMEOUT."
        return f"{what}\nCheck the network and HF_ENDPOINT, or try again later. {limit}"
    meaning, remedy = "The Hub has an internal error.", "Push again later."
    if status < 500:
        meaning = _MEANINGS.get(status, "The Hub refuses.")
        remedy = _REMEDIES.get(status, f"Check {target.id_option} {target.repo_id!r}, and the token and its rights.")
    if (wait := _asked_wait(error)) and wait > _LONGEST_WAIT:
        meaning += f" It asks to wait {wait:g} s; the limit is {_LONGEST_WAIT} s."
    return f"{meaning} ({target.asked_by}, {target.repo_type} {target.repo_id!r}) {text}\n{remedy}"


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error of the client, `None` if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def log(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")


def with_retries(action: Callable[[], T], doing: str, attempts: int = 4) -> T:
    """
    The value of `action`, called again after a wait if the Hub is busy or the connection breaks. The last error is raised;
    messages call the action `doing`.
    """
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    limit_waiting()
    waited = silent = 0.0  # seconds
    for attempt in range(attempts - 1):
        try:
            return action()
        except (HTTPError, OSError, RuntimeError) as raised:
            error = _cause(raised)
            status = status_of(error)
            passes = (status is None or status == 429 or status >= 500) and not isinstance(error, OfflineModeIsEnabled)
            wait = _asked_wait(error) or 2.0**attempt
            waited, silent = waited + wait, silent + STALL_TIMEOUT.ends()
            is_last = waited > _LONGEST_WAIT or silent + seconds_for_one() > seconds_for_all()
            if not passes or is_last or _is_local(error) or isinstance(error, LabError):
                raise
            what = "no answer" if status is None else f"status {status}"
            log(f"{doing}: {what} from the Hub; again in {wait:g} s ({attempt + 1} of {attempts - 1}).")
            time.sleep(wait)
    return action()


def _cause(error: BaseException) -> BaseException:
    """The cause of the RuntimeError that the client raises for errors of large files."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_local(error: BaseException) -> bool:
    """Whether a local file is the problem, so that retrying is useless; the Hub's errors are OSErrors too."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in FULL)


def _asked_wait(error: BaseException) -> float | None:
    return asked_wait(getattr(getattr(error, "response", None), "headers", None) or {})
