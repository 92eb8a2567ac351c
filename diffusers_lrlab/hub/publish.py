"""Uploading a run to the Hub: checked before training, and only what a user of the model needs."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LabError

if TYPE_CHECKING:
    from ..training.config import TrainingConfig

# Checkpoints hold optimizer and random states, logs are the tracker's: neither is part of the result.
UPLOADED = ["model_index.json", "pipeline.py", "README.md", "unet/*", "denoiser/*", "scheduler/*", "lrlab/*"]
KEPT_BACK = ["*.npy", ".tmp-*", "*/.tmp-*"]


def _repo_id(config: TrainingConfig, user: str) -> str:
    name = config.hub_model_id or Path(config.output_dir).resolve().name
    return name if "/" in name else f"{user}/{name}"


def check_can_push(config: TrainingConfig) -> None:
    """
    Makes sure, before training, that the result can be uploaded: creates the repository, unless this is a dry run, and
    completes `config.hub_model_id`.

    Raises:
        LabError: without a token, with one that the Hub does not accept, or with an id it does not allow.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    token = config.hub_token or get_token()
    if not token:
        raise LabError(
            "--push_to_hub needs a token with the right to write. Run `hf auth login`, set HF_TOKEN, or pass --hub_token."
        )
    api = HfApi(token=token)
    try:
        repo_id = _repo_id(config, api.whoami()["name"])
        if not config.dry_run:
            api.create_repo(repo_id, private=config.hub_private_repo or None, exist_ok=True)
    except HFValidationError as error:
        raise LabError(f"--hub_model_id {config.hub_model_id!r} is not a valid id: {error}") from None
    except HfHubHTTPError as error:
        raise LabError(
            f"The Hub refuses --push_to_hub: {error}\nCheck --hub_model_id, and the token and its rights: it comes from "
            "--hub_token, HF_TOKEN or `hf auth login`, in this order."
        ) from None
    # A failed connection is an HTTPError in huggingface_hub 1 and later, an OSError before.
    except (HTTPError, OSError) as error:
        raise LabError(
            f"The Hub cannot be reached for --push_to_hub: {error}\nCheck the network, or leave --push_to_hub out and "
            "upload the run later."
        ) from None
    config.hub_model_id = repo_id


def push_run(folder: Path, config: TrainingConfig, message: str) -> str:
    """
    Uploads pipeline, card and evidence of a run; returns the commit's address.

    Args:
        folder (`Path`): Of the run.
        config ([`TrainingConfig`]): After [`check_can_push`].
        message (`str`): Of the commit.

    Raises:
        LabError: if the upload fails; with the command that repeats it.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError

    assert config.hub_model_id is not None
    try:
        with warnings.catch_warnings():
            # The client takes parquet beside a model for a mistake; here it is part of the evidence.
            warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")
            commit = HfApi(token=config.hub_token or get_token()).upload_folder(
                repo_id=config.hub_model_id,
                folder_path=str(folder),
                allow_patterns=UPLOADED,
                ignore_patterns=list(KEPT_BACK),
                commit_message=message,
            )
    except (HTTPError, OSError) as error:
        patterns = [*(f"--include={pattern}" for pattern in UPLOADED), *(f"--exclude={pattern}" for pattern in KEPT_BACK)]
        command = shlex.join(["hf", "upload", config.hub_model_id, str(folder), ".", *patterns])
        raise LabError(
            f"The upload failed: {error}\nWhat the run has saved is in {str(folder)!r}. Upload it by `{command}`"
        ) from None
    return str(commit)
