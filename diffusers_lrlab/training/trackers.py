"""The trackers of `--logger`: names, start, and what is logged to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import did_you_mean, must_be
from ..core.plugins import failures_located
from .run_folder import PROJECT

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from .config import ResolvedConfig


def tracker_names(logger: str) -> list[str]:
    """The trackers named by `--logger`, each once. Raises a `LabError` for one that accelerate does not know."""
    if logger == "none":
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS as KNOWN

    names = list(dict.fromkeys(name.strip() for name in logger.split(",")))
    for name in names:
        if name not in KNOWN:
            wanted = f"'none', or trackers of accelerate with commas between them: {', '.join(sorted(KNOWN))}"
            raise must_be("--logger", logger, wanted, did_you_mean(name, KNOWN).strip() or f"{name!r} is not one of them")
    return names


def tracker_packages(logger: str) -> list[str]:
    """The packages of these trackers, which have their names; none for trackers that a plug-in registered."""
    names = tracker_names(logger)
    if not names:
        return []
    from accelerate.utils import LoggerType

    return [name for name in names if name in LoggerType.list()]


def start_trackers(
    config: ResolvedConfig, logs: Path, name: str, group: str | None = None, **about: Any
) -> list[GeneralTracker]:
    """
    Starts a run in each tracker, with the configuration and further facts `about` the run.

    Name and group go to trackers that have them, the folder `logs` to trackers that write files.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    known = {key: value for key, value in config.to_dict().items() if isinstance(value, (int, float, str, bool))} | about
    named = {"name": name, "group": group}
    own: dict[str, Any] = {"wandb": {**named, "dir": str(logs)}, "trackio": {**named, "config": known}}
    trackers = []
    for each in tracker_names(config.logger):
        logs.mkdir(parents=True, exist_ok=True)
        tracker_class = LOGGER_TYPE_TO_CLASS[each]
        folder = [str(logs)] if tracker_class.requires_logging_directory else []
        with failures_located(f"The tracker {each!r}", ". Hint: fix that, or leave it out of --logger."):
            tracker = tracker_class(PROJECT, *folder, **own.get(each, {}))
            tracker.start()
            tracker.store_init_configuration(known)
        trackers.append(tracker)
    return trackers


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row of the log with the names that are usual in trackers: train/loss, train/lr, validation/loss, ..."""
    scalars = {key: value for key, value in row.items() if key != "update" and isinstance(value, (int, float))}
    start = "validation_"
    return {
        f"{'validation' if key.startswith(start) else 'train'}/{key.removeprefix(start)}": scalars[key] for key in scalars
    }


def log_images(trackers: Iterable[GeneralTracker], name: str, images: np.ndarray, update: int) -> None:
    """Logs 8-bit images `(num, height, width, 1 or 3)` to the trackers that take images."""
    images = np.broadcast_to(images, (*images.shape[:3], 3))
    in_a_row = np.concatenate(list(images), axis=1)
    for tracker in trackers:
        if tracker.name == "trackio":  # accelerate has no method for its images
            import trackio

            tracker.log({name: trackio.Image(in_a_row)}, step=update)
        elif hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({name: images}, step=update, **layout)
