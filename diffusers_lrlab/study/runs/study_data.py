"""What the executors of a study share: the folder, data that are loaded once, plans, progress."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ...core.environment import describe_environment
from ...core.errors import LabError
from ...core.files import write_text
from ...data.loading import TrainingData
from ...training.config import DataConfig
from ...training.kinds.select import kind_of
from ...training.plan import Plan, make_plan
from ...training.run_state import RunState
from ..spec.spec import RunSpec
from ..stacked.probe import fastest_products
from .precision import check_precision
from .results import StudyFolder

# For a GPU a guess that nobody has measured.
_STACK_SIZES = {"cpu": 20, "cuda": 256}


class Bench:
    """
    Where the runs of a study are done.

    Args:
        folder ([`StudyFolder`]): Where results go.
        stack_size (`int`, *optional*): Runs side by side at most.
        quiet (`bool`, *optional*): Say nothing.
        precision (`str`, *optional*): Of products of matrices, a name in `PRECISIONS`.

    Raises:
        LabError: for a precision that this machine does not have.
    """

    def __init__(self, folder: StudyFolder, stack_size: int | None = None, quiet: bool = False, precision: str = "fp32"):
        self.folder, self.quiet, self.precision = folder, quiet, precision
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.stack_size = stack_size or _STACK_SIZES.get(self.device.type, 20)
        check_precision(precision, self.device)
        self.meta = describe_environment()
        self._data: dict[Any, TrainingData] = {}
        self._bar: tqdm | None = None

    def say(self, text: str) -> None:
        """Tells the user something, above a progress bar."""
        if not self.quiet:
            tqdm.write(text)

    def data(self, spec: RunSpec) -> TrainingData:
        """The data of a run; points are the same for all seeds, and loaded once."""
        config = spec.config
        names = [field.name for field in dataclasses.fields(DataConfig)]
        seed = config.seed if config.point_column is None or config.streaming else 0
        key = (repr([getattr(config, name) for name in names]), seed)
        if key not in self._data:
            self._data[key] = kind_of(config).load_data(config, 1)
        return self._data[key]

    def plan(self, spec: RunSpec, output_dir: str = "run") -> tuple[Plan, TrainingData]:
        """What a run is going to do."""
        # Pictures from the middle of a run would go with its folder.
        config = dataclasses.replace(spec.config, output_dir=output_dir, save_images_epochs=sys.maxsize)
        data = self.data(spec)
        try:
            return make_plan(config, data, spec.model), data
        except LabError as error:
            raise LabError(f"In the arm {spec.arm!r} on {spec.dataset!r}: {error}") from None

    def drop_outdated(self, specs: list[RunSpec]) -> None:
        """
        Removes results that are to be made again, and says so.

        They are of data that have changed since (a folder keeps its name when its points change), or their weights cannot be
        read.
        """
        from safetensors import SafetensorError, safe_open

        outdated, damaged = [], []
        for spec in specs:
            result = self.folder.read(spec.id)
            if result is not None and result.record["train"].get("data_fingerprint") != self.data(spec).fingerprint:
                self.folder.run_file(spec.id).unlink()
                outdated.append(spec.id)
            weights = self.folder.weights_file(spec.id)
            try:
                if weights.exists():
                    safe_open(weights, "pt")  # reads the header, which knows the size
            except SafetensorError:
                weights.unlink()
                self.folder.run_file(spec.id).unlink(missing_ok=True)
                damaged.append(spec.id)
        if damaged:
            self.say(f"The weights of {len(damaged)} runs are damaged, which are done again: {', '.join(damaged)}.")
        if outdated:
            self.say(f"The data have changed since {len(outdated)} runs, which are done again: {', '.join(outdated)}.")

    def products(self, model: Any, batch: int) -> dict[str, str]:
        """
        The fastest matrix products for stacks of a network, measured once for a study and a machine.

        Kept, since rounding depends on them: a study that goes on, or that gets more runs, computes what it would have
        computed. So they do not depend on how many runs there are.
        """
        file = self.folder.path / "products.json"
        try:
            known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except ValueError:
            self.say(f"{str(file)!r} is damaged: which products are fastest is measured again.")
            known = {}
        shape = "x".join(str(parameter.numel()) for parameter in model.parameters())
        where = [self.meta["processor"], str(self.meta["cpu_cores"]), self.meta["versions"]["torch"], self.precision]
        key = ", ".join([f"parameters {shape}", f"batch {batch}", *where])
        if key not in known:
            known[key] = fastest_products(model, batch)
            write_text(file, json.dumps(known, indent=1) + "\n")
        return known[key]

    def not_stackable(self, spec: RunSpec) -> str | None:
        """Why a run cannot be part of a stack; `None` if it can."""
        config = spec.config
        if config.point_column is None:
            return "stacks are of MLPDenoisers on points, and this is a UNet on images"
        if config.mixed_precision not in (None, "no"):
            return f"stacks have one precision, and this has mixed_precision {config.mixed_precision}"
        if self.data(spec).in_memory is None:
            return "its points are not in memory"
        return None

    # --- progress ----------------------------------------------------------------------------------------------------

    def start(self, specs: list[RunSpec], description: str) -> None:
        """Shows a bar over the updates of these runs."""
        total = sum(spec.config.max_train_steps or 0 for spec in specs)
        self._bar = tqdm(
            total=total or None,
            desc=description,
            unit="update",
            unit_scale=True,
            disable=self.quiet,
            mininterval=0.2 if sys.stderr.isatty() else 30,
        )

    def advance(self, updates: int) -> None:
        """Counts updates of runs."""
        if self._bar is not None:
            self._bar.update(updates)

    def finished(self, spec: RunSpec) -> None:
        """Notes that a run's result is there."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"last: {spec.arm} on {spec.dataset}, seed {spec.seed}")

    def stop(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def keep_weights(self, spec: RunSpec, run: RunState) -> None:
        """Keeps the averaged weights of a run on points, which are small, for what is measured between runs."""
        if spec.stage == "compare" and run.config.point_column is not None:
            with run.averaged_weights():
                tensors = {name: value.detach().cpu().clone() for name, value in run.bare_model.state_dict().items()}
            self.folder.write_weights(spec.id, tensors)

    def weights(self, run_id: str) -> dict[str, torch.Tensor] | None:
        """What [`keep_weights`] kept of a run, if anything."""
        from safetensors.torch import load_file

        file = self.folder.weights_file(run_id)
        return load_file(file) if file.exists() else None

    @property
    def stacks(self) -> Path:
        """Where stacks are saved."""
        return self.folder.path / "stacks"
