"""Uploading a run to the Hub: checked before training, and only what a user of the model needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LabError

if TYPE_CHECKING:
    from ..training.config import TrainingConfig

# Checkpoints hold optimizer and random states, logs are the tracker's: neither is part of the result.
UPLOADED = ["model_index.json", "README.md", "unet/*", "scheduler/*", "lrlab/*"]


def _repo_id(config: TrainingConfig, user: str) -> str:
    name = config.hub_model_id or Path(config.output_dir or "").resolve().name
    return name if "/" in name else f"{user}/{name}"


def check_can_push(config: TrainingConfig) -> str:
    """
    Makes sure, before training, that the result can be uploaded, and creates the repository.

    Returns:
        `str`: the repository's id.

    Raises:
        LabError: without a token, with one that the Hub does not accept, or with an id it does not allow.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    token = config.hub_token or get_token()
    if not token:
        raise LabError(
            "--push_to_hub needs a token with the right to write. Run `hf auth login`, set HF_TOKEN, or pass --hub_token."
        )
    api = HfApi(token=token)
    try:
        repo_id = _repo_id(config, api.whoami()["name"])
        api.create_repo(repo_id, private=config.hub_private_repo or None, exist_ok=True)
    except HFValidationError as error:
        raise LabError(f"--hub_model_id {config.hub_model_id!r} is not a valid id: {error}") from None
    except HfHubHTTPError as error:
        raise LabError(f"The Hub refuses --push_to_hub: {error} Check the token's rights and --hub_model_id.") from None
    except OSError as error:
        raise LabError(f"The Hub cannot be reached for --push_to_hub: {error}") from None
    return repo_id


def push_run(folder: Path, config: TrainingConfig, message: str) -> str:
    """Uploads pipeline, card and evidence of a run in one commit; returns the commit's address."""
    from huggingface_hub import HfApi, get_token

    api = HfApi(token=config.hub_token or get_token())
    commit = api.upload_folder(
        repo_id=_repo_id(config, api.whoami()["name"]),
        folder_path=str(folder),
        allow_patterns=UPLOADED,
        ignore_patterns=["*.npy", ".tmp-*", "*/.tmp-*"],
        commit_message=message,
    )
    return str(commit)
