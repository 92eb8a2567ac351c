"""Logs runs of a study to trackers."""

from pathlib import Path
from typing import Any

from ...training.trackers import scalars_of, start_trackers
from ..spec.spec import RunSpec


def show_in_trackers(study_folder: Path, spec: RunSpec, record: dict[str, Any]) -> None:
    """Logs a finished run to the trackers of `logger`, in the group of its study; stacked runs finish together."""
    about = {name: getattr(spec, name) for name in ("arm", "dataset", "seed", "stage")}
    folder = study_folder.resolve()
    trackers = start_trackers(spec.config, folder / "logs" / spec.id, spec.id, folder.name, **about)
    run, rows = record["train"], dict[int, dict[str, float]]()
    for columns in record["curves"].values():
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            rows.setdefault(row["update"], {}).update(row)
    for tracker in trackers:
        for update, row in sorted(rows.items()):  # most trackers require increasing updates
            tracker.log(scalars_of(row), step=update)
        tracker.log({f"results/{name}": value for name, value in run["results"].items()}, step=run["updates_done"])
        tracker.finish()
