"""The finder's result in the folder of a run, if it applies to that run."""

import json
from pathlib import Path
from typing import Any

from ..core.options import defaults_of, names_where
from ..training.config import TrainingConfig, complete_options
from ..training.record_schema import problem_in
from ..training.run_folder import FINDER_FILES

_RESULT = {
    **{"learning_rate": float | None, "settings.rule": str, "sweeps": list[dict], "seconds": float},
    "suggestions": dict[str, dict],
}


def deciding(config: dict[str, Any], num_parameters: int, global_batch: int) -> dict[str, Any]:
    """The settings that the best learning rate depends on, as data."""
    config = complete_options(config)
    fields = {name: config[name] for name in names_where(TrainingConfig, finder="compares")}
    fields["mixed_precision"] = fields["mixed_precision"] or "no"
    return json.loads(json.dumps({"config": fields, "num_parameters": num_parameters, "global_batch": global_batch}))


def read_saved_result(folder: Path, run: Any) -> dict[str, Any] | None:
    """
    The finder's result in the folder of a run, given by its [`Plan`] or record; `None` if it is missing, damaged, or of
    another run.
    """
    try:
        found = json.loads((folder / "lrlab" / FINDER_FILES[0]).read_text(encoding="utf-8"))
        then = dict(found["about"]["deciding"])
        then["config"] = {**_defaults(), **then["config"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(run, dict):
        now = deciding(run["config"], run["train"]["num_parameters"], run["train"]["global_batch"])
    else:
        now = deciding(run.config.to_dict(), run.num_parameters, run.layout.global_batch)
    is_whole = not problem_in(found, _RESULT) and found["settings"]["rule"] in found["suggestions"]
    return found if is_whole and _comparable(then) == _comparable(now) else None


def _defaults() -> dict[str, Any]:
    """Of the options that a result depends on, for a result that is older than some of them."""
    return {name: defaults_of(TrainingConfig)[name] for name in names_where(TrainingConfig, finder="compares")}


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """No parameters are the same, resolved or not."""
    return {**settings, "config": {name: value if value != {} else None for name, value in settings["config"].items()}}
