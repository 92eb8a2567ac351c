"""The run that an extended or a branched run continues from: its settings, curve and checkpoints."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import LabError, did_you_mean, must_be, warn
from ..core.manifest import find_damage
from ..core.options import names_where
from ..core.words import counted
from ..data.layout import BatchLayout
from ..hub.records import open_run, recorded_options
from ..schedules.expected import RunCurve
from ..training.config import ResolvedConfig, TrainingConfig
from ..training.plan import updates_between_validations
from ..training.resolve import resolve_config
from ..training.resolve_timesteps import objective_spec
from ..training.resume import read_state
from ..training.run_files import LAB
from ..training.run_folder import RunFolder, checkpoint_update

# Options of this start of a run that a run which goes on from it keeps, besides those that repeat it.
_KEPT = ("plugins", "logger", "logging_dir")
_NUM_COMPARED = 33  # densities of timesteps, over a run


@dataclass(frozen=True)
class Parent:
    """A run to continue from."""

    folder: RunFolder
    record: dict[str, Any]
    state: dict[str, Any]  # `trainer.json` of its newest intact checkpoint
    checkpoints: dict[int, Path]  # intact ones by update, in order
    config: ResolvedConfig

    @property
    def num_updates(self) -> int:
        """Its length."""
        return self.state["num_updates"]

    @property
    def newest(self) -> int:
        """The update of its newest checkpoint."""
        return max(self.checkpoints)

    @cached_property
    def curve(self) -> RunCurve:
        batch = self.state["global_batch"]
        schedule, peak = self.config.schedule_for(batch), self.config.peak_learning_rate(batch)
        if schedule.follows_metric:
            raise LabError(
                f"{str(self.folder.path)!r}: the schedule {self.config.lr_scheduler!r} follows the validation loss, so its "
                "rates over another length are not known in advance. Hint: train with a schedule of the clock, such as "
                "constant_with_warmup or warmup_stable_decay."
            )
        warmup = self.record["train"]["warmup_updates"]
        return RunCurve(schedule, peak, self.config.start_momentum, warmup, self.num_updates)

    def options_of(self, curve: RunCurve, output_dir: Path) -> dict[str, Any]:
        """
        The options of a run with another curve. What depends on the length, such as a warm-up of 5 %, stays as it was; so
        the same options start a run that is equal from its beginning.
        """
        names = (*names_where(TrainingConfig, is_repeated=True), *_KEPT)
        options = {name: getattr(self.config, name) for name in names}
        layout = BatchLayout(
            self.config.train_batch_size, self.config.gradient_accumulation_steps, self.state["num_processes"], 0
        )
        num_held_out = self.record["train"]["num_held_out_images"]
        every = updates_between_validations(self.config, layout, self.num_updates, num_held_out)
        if (curve.schedule.name, curve.schedule.kwargs) != (self.curve.schedule.name, self.curve.schedule.kwargs):
            given = {key: value for key, value in curve.schedule.kwargs.items() if value is not None}
            options |= {"lr_scheduler": curve.schedule.name, "lr_scheduler_kwargs": given}
        return options | {
            "max_train_steps": curve.num_updates,
            "num_epochs": None,
            "lr_warmup_steps": float(curve.warmup_updates),
            "validation_steps": every if num_held_out else self.config.validation_steps,
            "output_dir": str(output_dir),
        }

    def check_timesteps(self, num_updates: int, at: int) -> None:
        """Raises a `LabError` if a curriculum of timesteps would differ in a run of this length."""
        spec = objective_spec(self.config)
        process = spec.make_process()
        samplers = [spec.make_sampler(process, num) for num in (self.num_updates, num_updates)]
        if not samplers[0].moves:
            return
        updates = np.unique(np.linspace(0, max(at - 1, 0), _NUM_COMPARED).astype(int))
        if any(not samplers[0].probabilities(int(n)).equal(samplers[1].probabilities(int(n))) for n in updates):
            raise LabError(
                f"--timestep_sampler {self.config.timestep_sampler}: its curriculum follows the length of the run, which "
                f"was {counted(self.num_updates, 'update')}. With {num_updates}, the timesteps before update {at} would "
                "come from a different density. Hint: start a run of the new length."
            )


def read_parent(path: Path) -> Parent:
    """The run in a folder; raises a `LabError` if no other run can continue from it."""
    if not path.is_dir():
        hint = did_you_mean(str(path), (str(record.parents[1]) for record in path.parent.glob("*/lrlab/run.json")))
        hint = hint or "give the --output_dir of `lrlab train`"
        raise must_be("RUN", str(path), "the folder of a run", hint.strip(), got="a name that no folder has")
    record, folder = open_run(path, lambda name: name.startswith(f"{LAB}/")), RunFolder(path)
    checkpoints, damaged = {}, []
    for checkpoint in folder.checkpoints():
        if (damage := find_damage(checkpoint)) is None:
            checkpoints[checkpoint_update(checkpoint)] = checkpoint
        else:
            damaged.append(damage)
    for damage in damaged:
        warn(f"{damage}. This checkpoint is not used.")
    if not checkpoints:
        raise LabError(
            f"{str(path)!r} has no {'intact ' if damaged else ''}checkpoint to continue from: the weights alone lack the "
            "state of the optimizer and of the clock. Hint: keep the checkpoint-N folders of a run, or start from its "
            "weights with --pretrained_model_name_or_path."
        )
    state = read_state(checkpoints[max(checkpoints)])
    return Parent(folder, record, state, checkpoints, _config_of(path, record, state))


def _config_of(path: Path, record: dict[str, Any], state: dict[str, Any]) -> ResolvedConfig:
    """The configuration of a checkpoint, resolved by this version."""
    from .. import __version__

    options = recorded_options(record, str(path), state["config"], repeated=True, also=_KEPT)
    if (made_by := record["meta"]["versions"].get("diffusers_lrlab", "unknown")) != __version__:
        warn(
            f"{str(path)!r} was made by diffusers_lrlab {made_by}, and this is {__version__}: results may differ in their "
            "last bits."
        )
    if options.get("max_train_steps") is not None:
        options.pop("num_epochs", None)
    return resolve_config(TrainingConfig(**options | {"output_dir": str(path)}))
