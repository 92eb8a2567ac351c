"""What the finder left in the folder of a run, if it is of this run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..training.run_folder import FINDER_FILES

_NEEDED = {"learning_rate", "settings", "suggestions", "sweeps", "seconds", "about"}
# Fields of the configuration that a learning rate depends on most; model and batch beside them.
_DECIDING = (
    *("dataset_name", "dataset_config_name", "train_data_dir", "resolution", "image_channels", "point_column"),
    *("optimizer", "optimizer_kwargs", "prediction_type", "ddpm_num_steps", "ddpm_beta_schedule", "loss_weighting"),
    *("loss_weighting_kwargs", "timestep_sampler", "timestep_sampler_kwargs", "timestep_lr", "timestep_lr_kwargs", "noise"),
    *("noise_kwargs", "adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon", "max_grad_norm"),
)


def deciding(config: dict[str, Any], num_parameters: int, global_batch: int) -> dict[str, Any]:
    """
    What a test of learning rates was of, as data.

    Args:
        config (`dict`): Every field of the training configuration.
        num_parameters (`int`): Of the model.
        global_batch (`int`): Images of an update.
    """
    fields = {name: config.get(name) for name in _DECIDING} | {"mixed_precision": config.get("mixed_precision") or "no"}
    return json.loads(json.dumps({"config": fields, "num_parameters": num_parameters, "global_batch": global_batch}))


def kept_result(folder: Path, run: Any) -> dict[str, Any] | None:
    """
    The finder's result as data; `None` if there is none, if it is damaged, and if it is of something else than this run.

    Args:
        folder (`Path`): Of the run.
        run ([`Plan`] or `dict`): Its plan, or its record.
    """
    try:
        found = json.loads((folder / "lrlab" / FINDER_FILES[0]).read_text(encoding="utf-8"))
        about = found["about"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(run, dict):
        now = deciding(run["config"], run["train"]["num_parameters"], run["train"]["global_batch"])
    else:
        now = deciding(run.config.to_dict(), run.num_parameters, run.layout.global_batch)
    return found if found.keys() >= _NEEDED and about.get("deciding") == now else None
