"""The options in the record of a run or in one of its checkpoints: the only reader of both."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import LabError
from ..core.options import names_where

_ALWAYS = {"decoding": "float", "on_divergence": "stop", "base_batch_size": 64, "ema_update_every": 1}


def recorded_options(
    record: Mapping[str, Any],
    name: str,
    config: Mapping[str, Any] | None = None,
    repeated: bool = False,
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """
    The resolved options of a run in the folder `name`; options that were added since then have their defaults.

    `config` has options to read in place of the record's, such as those of a checkpoint. `repeated` takes only the options
    that start the same run again, and `also` others, without those that are `None`, and with the commit of the weights that
    it started from. Raises a `LabError` for an option that was in use and that this version does not know.
    """
    from ..training.config import TrainingConfig, complete_options

    saved = dict(record["config"] if config is None else config)
    saved["distance_samples"] = saved.pop("frechet_samples", None) or saved["distance_samples"]  # one option since 0.2.0
    known = {field.name for field in dataclasses.fields(TrainingConfig)}
    # An option that has left since then decided nothing if it was off, or asked for what is always done now.
    saved = {key: value for key, value in saved.items() if key in known or (value and value != _ALWAYS.get(key))}
    if unknown := sorted(saved.keys() - known):
        made_by = record.get("meta", {}).get("versions", {}).get("diffusers_lrlab", "of then")
        raise LabError(
            f"The record of {name!r} has {unknown[0]!r}, which this version does not know. Use the version that made it, "
            f"diffusers_lrlab {made_by}."
        )
    if not repeated:
        return complete_options(saved)
    taken = (*names_where(TrainingConfig, is_repeated=True), *also)
    options = {key: value for key, value in saved.items() if key in taken and value is not None}
    start = record["train"].get("started_from", {})
    read = {"pretrained_model_name_or_path": f"{start['name_or_path']}@{start['commit']}"} if start.get("commit") else {}
    return options | read
