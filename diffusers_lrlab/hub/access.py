"""Access to the Hub: the repository of an upload, the right to write there, and explanations of the client's errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError
from ..core.files import FULL

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class Target:
    """A repository to upload to."""

    repo_id: str  # [`named`] adds the user to a bare name
    repo_type: str = "model"  # or "dataset"
    private: bool = False  # if it is new
    revision: str = "main"  # a branch, which is created if it is missing
    create_pr: bool = False
    token: str | None = field(default=None, repr=False)  # that of `HF_TOKEN` or `hf auth login` if not given
    asked_by: str = "lrlab push"  # the command or option that uploads, for messages
    id_option: str = "--repo_id"  # what gave the id, likewise

    @property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi, get_token

        return HfApi(token=self.token or get_token())

    @property
    def where(self) -> dict[str, Any]:
        """Arguments that most calls of the client take."""
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}


def named(target: Target) -> Target:
    """The target with a complete id; raises a `LabError` for an invalid token."""
    from huggingface_hub import get_token

    if not (target.token or get_token()):
        raise LabError(f"{target.asked_by} needs a token with write permission. Run `hf auth login`, or set HF_TOKEN.")
    with hub_errors(target):
        user = target.api.whoami()["name"]
    return target if "/" in target.repo_id else dataclasses.replace(target, repo_id=f"{user}/{target.repo_id}")


def make_ready(target: Target) -> None:
    """Creates repository and branch if they are missing; raises a `LabError` if nothing can be uploaded to them."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    api = target.api
    with hub_errors(target):
        if target.create_pr:
            api.repo_info(**target.where)  # everybody may propose changes to an existing repository
            return
        api.create_repo(**target.where, private=target.private or None, exist_ok=True)
        # Of a repository that exists. The client's own `auth_check` takes `write` only in newer versions.
        path = f"{api.endpoint}/api/{target.repo_type}s/{target.repo_id}/auth-check/write"
        hf_raise_for_status(get_session().get(path, headers=build_hf_headers(token=api.token)))
        if target.private and not api.repo_info(**target.where).private:
            raise LabError(
                f"{target.id_option} {target.repo_id!r} exists and is public. Make it private in its settings on the "
                "Hub, or leave out the option that asks for a private one."
            )
        if target.revision != "main":
            api.create_branch(**target.where, branch=target.revision, exist_ok=True)


@contextmanager
def hub_errors(target: Target) -> Iterator[None]:
    """Turns errors of the client into a `LabError` with a remedy."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except LabError:
        raise
    # A failed connection is an HTTPError in huggingface_hub 1 and later, an OSError before; the client's checks, such as of
    # a card's metadata, raise ValueErrors, and uploads of large files RuntimeErrors with a cause.
    except (HTTPError, OSError, RuntimeError, ValueError) as raised:
        error = (raised.__cause__ if isinstance(raised, RuntimeError) else None) or raised
        if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
            raise  # of a local file
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = f"check {target.id_option} {target.repo_id!r}, and the rights of the token."
        if status is None and not isinstance(error, ValueError):
            remedy = "the Hub cannot be reached: check the network and HF_ENDPOINT, and try again."
        elif status == 401:
            remedy = "the Hub does not accept the token of --hub_token, HF_TOKEN or `hf auth login`; make a new one."
        elif status == 429 or (status or 0) >= 500:
            remedy = "the Hub is busy or broken, so try again later."
        raise LabError(f"{target.asked_by}, {target.repo_type} {target.repo_id!r}: {error}\nHint: {remedy}") from None
