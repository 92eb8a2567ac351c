"""The averages of the weights that a third-party script trains, and snapshots of post-hoc ones in its output folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...averaging.forms import EMAForm, forms_of
from ...averaging.posthoc import snapshot_updates
from ...averaging.snapshots import snapshot_folder, snapshots_in, update_of, write_snapshot
from ...core.background import BackgroundWrite
from ...core.errors import LabError
from ...core.files import remove, write_text

if TYPE_CHECKING:
    from ...averaging.averages import EMA
    from .trained_models import TrainedModels

SNAPSHOTS = "ema_snapshots"  # in `lrlab/` of the output folder
BY_NAMES = "average.safetensors"  # for weights that the script's own files lack
PLACES = "places.json"  # in that folder: where the script's format has each trained parameter
SWEEP = "sweep.json"  # there, too: the held-out loss by width, measured after the last update


def numbered(path: Path, index: int) -> Path:
    """The path of an average: those beside the first one have a number, such as `ema_2`."""
    return path.with_name(f"{path.stem}_{index + 1}{path.suffix}") if index else path


class ScriptAverages:
    """
    The averages of `--ema`, stepped together. The first one is validated and saved in place of the weights. The others are
    saved too, except the wider ones of post-hoc averages, of which there are snapshots. Snapshots are copied to the host
    after an update, and a thread writes the copy.
    """

    def __init__(self, spec: str):
        self.given = forms_of(spec)
        self.forms = [track for form in self.given for track in form.tracks]
        self.emas: list[EMA] = []  # none before the models are known, and after a resume without averages
        self.updates: list[int] | None = None  # with a snapshot; `None` until the length of the run is known
        self._writing = BackgroundWrite("write snapshot")

    @property
    def posthoc(self) -> EMAForm | None:
        return next((form for form in self.given if form.is_posthoc), None)

    @property
    def saved(self) -> list[int]:
        """The numbers of the averages that are saved in the script's format."""
        first, found = 0, [0]
        for form in self.given:
            found += [first] if first and not form.is_posthoc else []
            first += len(form.tracks)
        return found

    @property
    def lacks_images(self) -> bool:
        return any(form.lacks_images for form in self.forms)

    def know_images(self, images_per_update: int) -> None:
        self.forms = [form.with_images(images_per_update) for form in self.forms]
        for ema, form in zip(self.emas, self.forms, strict=False):
            ema.form = form

    def restart(self, parameters: list[torch.nn.Parameter]) -> None:
        """The averages are the weights as they are."""
        from ...averaging.averages import EMA

        self.emas = [EMA(parameters, form, dtype=torch.float32) for form in self.forms]

    def plan_snapshots(self, num_updates: int | None) -> None:
        """Decides the updates with a snapshot, once the updates of the whole run are known; a `LabError` if they are not."""
        if (posthoc := self.posthoc) is None:
            self.updates = []
            return
        if num_updates is None:
            raise LabError(
                "--ema posthoc needs the number of updates, which the script's arguments do not determine, to space its "
                "snapshots. Give --num_updates N before its name."
            )
        known = posthoc.kwargs
        self.updates = snapshot_updates(num_updates, known["snapshots"], known["start_update"], known["update_every"])

    def advance(self, update: int) -> None:
        for ema in self.emas:
            ema.advance(update)

    def write_snapshot(self, folder: Path, update: int, names: list[str], script: str) -> None:
        """
        Starts to write a snapshot, if one is due after this many updates, into `ema_snapshots/` of a folder. Raises an error
        that the previous snapshot had.
        """
        self._writing.check()
        if (posthoc := self.posthoc) is None or update not in (self.updates or ()):
            return
        first = sum(len(form.tracks) for form in self.given[: self.given.index(posthoc)])
        of_widths = self.emas[first : first + len(posthoc.tracks)]
        widths = zip(posthoc.kwargs["sigma_rels"], of_widths, strict=True)
        copies = {width: [value.to("cpu", copy=True) for value in ema.shadow_params] for width, ema in widths}
        averages = {width: dict(zip(names, values, strict=True)) for width, values in copies.items()}
        facts: dict[str, Any] = {"update": update, "end": update - posthoc.kwargs["start_update"], "of": {"script": script}}
        where, dtype = snapshot_folder(folder / SNAPSHOTS, update), posthoc.kwargs["dtype"]
        self._writing.start(write_snapshot, where, averages, dtype, facts)

    def finish_snapshots(self) -> None:
        """Waits until the last snapshot is written."""
        self._writing.wait()

    def rewind_snapshots(self, folder: Path, update: int) -> None:
        """Removes the snapshots of later updates: a resumed script takes them again, and a new one has others or none."""
        self.finish_snapshots()
        for path in snapshots_in(folder / SNAPSHOTS):
            if update_of(path) > update:
                remove(path)
        (folder / SNAPSHOTS / SWEEP).unlink(missing_ok=True)

    def write_places(self, folder: Path, trained: TrainedModels, saved: Path) -> None:
        """Notes where the files of the saved average have each parameter, by which `lrlab ema` puts others there."""
        if self.posthoc is not None:
            places = {name: (BY_NAMES, name) for name in trained.names} if (saved / BY_NAMES).exists() else {}
            places |= trained.places_in(saved)
            write_text(folder / SNAPSHOTS / PLACES, json.dumps({"parameters": places}, indent=1) + "\n")
