"""The trackers of `--logger`: which there are, how they are started, and what they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import LabError, did_you_mean, failures_located
from .run_folder import PROJECT

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from .config import ResolvedConfig


def tracker_names(logger: str) -> list[str]:
    """The trackers in the text of `--logger`, each once; a `LabError` for one that accelerate does not know."""
    if logger == "none":
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS as KNOWN

    names = list(dict.fromkeys(name.strip() for name in logger.split(",")))
    for name in names:
        if name not in KNOWN:
            raise LabError(
                f"--logger {logger!r}: accelerate knows no tracker {name!r}.{did_you_mean(name, KNOWN)} Give 'none', or one "
                f"or several, with commas, of {', '.join(sorted(KNOWN))}."
            )
    return names


def tracker_packages(logger: str) -> list[str]:
    """The packages of these trackers, which are called as they are; none for a tracker that somebody registered."""
    names = tracker_names(logger)
    if not names:
        return []
    from accelerate.utils import LoggerType

    return [name for name in names if name in LoggerType.list()]


def start_trackers(
    config: ResolvedConfig,
    logs: Path,
    name: str,
    group: str | None = None,
    resumed: Mapping[str, str] | None = None,
    **about: Any,
) -> list[GeneralTracker]:
    """
    Starts a run in each tracker, with the configuration and what else is known `about` the run. Its name and group are for
    those that have such, the folder `logs` for those that write files. Trackers that know the run by its id, which
    [`tracker_ids`] gave when it began, go on with it.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    known = {key: value for key, value in config.to_dict().items() if isinstance(value, (int, float, str, bool))} | about
    named = {"name": name, "group": group}
    tags = {"tags": {"group": group}} if group else {}
    own: dict[str, Any] = {
        "wandb": {**named, "dir": str(logs)},
        "trackio": {**named, "config": known},
        "mlflow": {"run_name": name, **tags},
    }
    trackers = []
    for each in tracker_names(config.logger):
        logs.mkdir(parents=True, exist_ok=True)
        tracker_class, run_id = LOGGER_TYPE_TO_CLASS[each], (resumed or {}).get(each)
        place = [str(logs)] if tracker_class.requires_logging_directory else []
        arguments = own.get(each, {})
        with failures_located(f"The tracker {each!r}", ". Mend that, or leave it out of --logger."):
            tracker = tracker_class(PROJECT, *place, **arguments, **_going_on(each, run_id))
            tracker.start()
            if run_id is not None and tracker_ids([tracker]) != {each: run_id}:  # trackio took the newest run of this name
                tracker.finish()
                tracker = tracker_class(PROJECT, *place, **arguments)
                tracker.start()
            tracker.store_init_configuration(known)
        trackers.append(tracker)
    return trackers


def _going_on(tracker: str, run_id: str | None) -> dict[str, Any]:
    """What a tracker has to be given to go on with a run; the files of others, such as tensorboard's, follow each other."""
    if run_id is None:
        return {}
    arguments = {"wandb": {"id": run_id, "resume": "allow"}, "trackio": {"resume": "allow"}, "mlflow": {"run_id": run_id}}
    return arguments.get(tracker, {})


def tracker_ids(trackers: Iterable[GeneralTracker]) -> dict[str, str]:
    """The ids that the runs have in those trackers that can go on with one."""
    ids = {}
    for tracker in trackers:
        if tracker.name in ("wandb", "trackio"):
            ids[tracker.name] = tracker.tracker.id
        elif tracker.name == "mlflow":
            ids[tracker.name] = tracker.tracker.info.run_id
    return ids


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row of the log under the names that users of trackers expect: train/loss, train/lr, validation/loss, ..."""
    scalars = {key: value for key, value in row.items() if key != "update" and isinstance(value, (int, float))}
    start = "validation_"
    return {
        f"{'validation' if key.startswith(start) else 'train'}/{key.removeprefix(start)}": scalars[key] for key in scalars
    }


def show_pictures(trackers: Iterable[GeneralTracker], name: str, pictures: np.ndarray, update: int) -> None:
    """8-bit pictures `(num, height, width, 1 or 3)`, for the trackers that take pictures."""
    pictures = np.broadcast_to(pictures, (*pictures.shape[:3], 3))
    in_a_row = np.concatenate(list(pictures), axis=1)
    for tracker in trackers:
        if tracker.name == "trackio":  # accelerate has no method for its pictures
            import trackio

            tracker.log({name: trackio.Image(in_a_row)}, step=update)
        elif tracker.name in ("aim", "clearml"):  # one picture for each name
            tracker.log_images({name: in_a_row}, step=update)
        elif hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({name: pictures}, step=update, **layout)
