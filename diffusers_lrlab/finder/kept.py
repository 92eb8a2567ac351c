"""What the finder left in the folder of a run, if it is of this run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..training.run_folder import FINDER_FILES

_NEEDED = {"learning_rate", "settings", "suggestions", "sweeps", "seconds", "about"}


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
    # What a learning rate depends on most.
    if isinstance(run, dict):
        train = run["train"]
        now = (run["config"]["optimizer"], train["global_batch"], train["num_parameters"])
    else:
        now = (run.config.optimizer, run.layout.global_batch, run.num_parameters)
    then = (about.get("optimizer"), about.get("global_batch"), about.get("num_parameters"))
    return found if found.keys() >= _NEEDED and then == now else None
