"""The record of a run and the options in it, which are untrusted input and checked first."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.manifest import refuse_damaged
from ..core.options import names_where
from ..training.record_schema import read_checked
from ..training.run_folder import RECORD

# Values of options that have left and asked for what is done now.
_ALWAYS = {"decoding": "float", "on_divergence": "stop", "base_batch_size": 64, "ema_update_every": 1}


def open_run(folder: Path, reads: Callable[[str], bool]) -> dict[str, Any]:
    """The [`read_record`] of a run to use; a `LabError` if it, or a file that `reads` selects, is damaged."""
    refuse_damaged(folder, only=lambda name: name == RECORD or reads(name))
    return read_record(folder)


def read_record(folder: Path) -> dict[str, Any]:
    """`lrlab/run.json` of a run; raises a `LabError` if it is missing or invalid."""
    file = folder / "lrlab" / "run.json"
    if not file.is_file():
        raise LabError(f"{str(folder)!r} holds no record of a run (lrlab/run.json). Give the folder of a run.")
    return read_checked(file)


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
    from ..training.config import TrainingConfig, complete_options  # which import torch

    saved = dict(record["config"] if config is None else config)
    known = {field.name for field in dataclasses.fields(TrainingConfig)}
    saved["distance_samples"] = saved.pop("frechet_samples", None) or saved["distance_samples"]  # one option since 0.2.0
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
