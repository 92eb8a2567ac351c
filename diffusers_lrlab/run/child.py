"""The folder of a run that continues from another run: made once, then resumed like any run."""

import json
import shutil
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..core.environment import launch_command
from ..core.errors import LabError
from ..core.files import number_in, write_text
from ..core.lock import locked
from ..core.options import defaults_of
from ..optimizers.build import tried_optimizer
from ..optimizers.entries import OPTIMIZERS
from ..schedules.continued import RunCurve
from ..training.config import ResolvedConfig, TrainingConfig
from ..training.handover import hand_over
from ..training.resolve import ADAM_OPTIONS, resolve_config
from ..training.resume import check_fresh, read_state
from ..training.run_folder import FINDER_FILES, RunFolder
from ..training.snapshots import inherit_snapshots
from .parent import Parent

_PREPARED = "prepared"  # status of a child until its training starts
_OPTIMIZER = "optimizer.bin"


@dataclass(frozen=True)
class Child:
    """A run that takes the state of another run after the update `at`, and continues with its own curve."""

    parent: Parent
    at: int
    curve: RunCurve
    output_dir: Path
    how: str  # "extended" or "branched"
    changed: dict[str, Any] = field(default_factory=dict)  # parameters of the optimizer from `at` on

    @property
    def config(self) -> TrainingConfig:
        """The options of the run."""
        options = self.parent.options_of(self.curve, self.output_dir)
        if self.changed:
            kwargs = _with_changes(self.parent, self.changed)
            if "adam" in OPTIMIZERS[self.parent.config.optimizer].traits:
                usual = defaults_of(TrainingConfig)  # of options whose parameter another one replaces
                options |= {option: kwargs.get(key, usual[option]) for option, key in ADAM_OPTIONS.items()}
            options["optimizer_kwargs"] = kwargs
        return TrainingConfig(**options, resume_from_checkpoint="latest")

    @property
    def facts(self) -> dict[str, Any]:
        """The entry `parent` of `run.json`: facts about the parent."""
        parent, before = self.parent, self.parent.config.optimizer_kwargs
        changed = {name: [before.get(name), value] for name, value in self.changed.items()}
        return {
            "how": self.how,
            "folder": str(parent.folder.path),
            "git_commit": parent.record["meta"].get("git_commit"),
            "version": parent.record["meta"]["versions"].get("diffusers_lrlab"),
            "update": self.at,
            "num_updates": parent.num_updates,
            "schedule": parent.curve.text,
            **({"changed": changed} if changed else {}),
            **({"parent": grandparent} if (grandparent := parent.record["run"].get("parent")) else {}),
        }

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        """The parent's rollbacks before `at`, whose factor still applies to the rates."""
        return list(read_state(self.parent.checkpoints[self.at])["rollbacks"])

    def is_prepared(self) -> bool:
        """Whether the folder holds this run; raises a `LabError` if it holds anything else."""
        folder = RunFolder(self.output_dir)
        record = folder.read_record() if self.output_dir.exists() else {}
        found = record.get("run", {}).get("parent")
        if found is None:
            try:
                check_fresh(folder, overwrite=False)
            except LabError as error:
                if folder.holds_run():
                    raise LabError(f"--out {str(self.output_dir)!r} already holds a run. Give another folder.") from None
                raise LabError(str(error).replace("--output_dir", "--out")) from None
            return False
        now = json.loads(json.dumps(self.facts))
        ours = {"parent": now | {"folder": found["folder"]}, "config": _compared(resolve_config(self.config).to_dict())}
        if ours != {"parent": found, "config": _compared(record["config"])}:
            raise LabError(
                f"--out {str(self.output_dir)!r} holds another run, {found['how']} from update {found['update']} of "
                f"{found['folder']!r}. Give another folder, or remove that one."
            )
        return not self._is_half_made(record)

    def _is_half_made(self, record: dict[str, Any]) -> bool:
        """Whether the command was killed while it made the folder."""
        status = record.get("run", {}).get("status")
        return status == _PREPARED and not RunFolder(self.output_dir).checkpoints()

    def prepare(self) -> None:
        """Makes the folder: log and snapshots so far, and last the parent's checkpoint with the settings of this run."""
        config, parent = resolve_config(self.config), self.parent
        source, folder = parent.checkpoints[self.at], RunFolder(self.output_dir)
        parent.folder.check_log_until(source)
        change = self._change_optimizer if self.changed else None
        with locked(folder.path, "--out"):
            if self.is_prepared():  # by another process, meanwhile
                return
            if self._is_half_made(folder.read_record()):
                folder.clear()
            folder.remove_leftovers()
            write_text(folder.lab / "run.json", json.dumps(self._record(config), indent=2) + "\n")
            self._copy_beside(folder)
            inherit_snapshots(parent.folder, folder, self.at, config.to_dict())
            length = self.curve.warmup_updates, self.curve.num_updates
            hand_over(source, parent.folder, folder, config, *length, change=change)

    def _record(self, config: ResolvedConfig) -> dict[str, Any]:
        """A record with the settings of this run and no results."""
        before, curve = self.parent.record, self.curve
        train = {key: value for key, value in before["train"].items() if key not in ("results", "loss_spikes")}
        run = {
            "status": _PREPARED,
            "command": launch_command() or f"lrlab {self.how}",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "starts": [],
            "seconds": 0.0,
            "program_registrations": before["run"].get("program_registrations", []),
            "parent": self.facts,
        }
        train |= {"num_updates": curve.num_updates, "updates_done": self.at}
        return {"run": run, "train": train, "config": config.to_dict(), "meta": before["meta"]}

    def _copy_beside(self, folder: RunFolder) -> None:
        """Copies what checkpoints leave out: earlier samples, the finder's result."""
        parent = self.parent.folder
        for name in FINDER_FILES:
            if (parent.lab / name).exists():
                shutil.copyfile(parent.lab / name, folder.lab / name)
        for file in (parent.lab / "samples").glob("*"):
            update = number_in(file.stem, "update-")
            if update is not None and update <= self.at < self.parent.num_updates:
                (folder.lab / "samples").mkdir(exist_ok=True)
                shutil.copyfile(file, folder.lab / "samples" / file.name)

    def _change_optimizer(self, checkpoint: Path) -> None:
        """Writes changed parameters into the groups of a saved optimizer."""
        file = checkpoint / _OPTIMIZER
        state = torch.load(file, weights_only=True)
        fresh = [_fresh_settings(self.parent, changed) for changed in ({}, self.changed)]
        differing = [key for key in fresh[0] if fresh[0][key] != fresh[1][key]]
        for group in state["param_groups"]:
            group.update({key: fresh[1][key] for key in differing if group.get(key) == fresh[0][key]})
        torch.save(state, file)


def _with_changes(parent: Parent, changed: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the parent's optimizer with some changed, without those that these replace or are replaced by."""
    entry = OPTIMIZERS[parent.config.optimizer]
    replaced = {parameter.instead_of for parameter in entry.parameters if parameter.name in changed}
    replaced |= {name for each in changed for name in entry.replacing(each)}
    return {key: value for key, value in parent.config.optimizer_kwargs.items() if key not in replaced} | changed


def _fresh_settings(parent: Parent, changed: dict[str, Any]) -> dict[str, Any]:
    """The settings of a new optimizer, in all its groups: Muon has one of matrices and one of vectors."""
    name, kwargs, batch = parent.config.optimizer, _with_changes(parent, changed), parent.state["global_batch"]
    groups = tried_optimizer(name, kwargs, [(2, 2), (2,)], parent.config.peak_learning_rate(batch), batch).param_groups
    names = ("params", "lr", "initial_lr")
    return {key: value for group in groups for key, value in group.items() if key not in names}


def check_changes(parent: Parent, changed: dict[str, Any]) -> dict[str, Any]:
    """Changed parameters of the optimizer, checked; a `LabError` for one that the saved optimizer cannot take over."""
    if not changed:
        return {}
    name, before = parent.config.optimizer, parent.config.optimizer_kwargs
    old, resolved = OPTIMIZERS[name].resolve(before), OPTIMIZERS[name].resolve(_with_changes(parent, changed))
    if "cautious" in changed and resolved.get("cautious") != old.get("cautious"):
        raise LabError(f"--with cautious is not a setting that {name!r} can change during a run. Leave it out.")
    fresh = [_fresh_settings(parent, each) for each in ({}, changed)]
    if fixed := [key for key in changed if old.get(key) != resolved.get(key) and fresh[0] == fresh[1]]:
        raise LabError(f"--with {', '.join(fixed)} is not a setting that {name!r} can change during a run. Leave it out.")
    if fresh[0] == fresh[1]:
        raise LabError(
            f"--with {', '.join(changed)} changes nothing: the optimizer of the run, {name!r}, has these values already."
        )
    if parent.curve.schedule.sets_momentum and {"beta1", "momentum"} & changed.keys():
        raise LabError("--with beta1 has no effect on a run whose schedule sets the momentum. Leave it out.")
    if not (parent.checkpoints[parent.newest] / _OPTIMIZER).is_file():
        raise LabError("--with needs the optimizer in one file, but the checkpoints of a sharded run split it into shards.")
    return {key: resolved.get(key, value) for key, value in changed.items()}


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """The options that make another run."""
    from ..core.options import names_where

    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    return json.loads(json.dumps({name: config.get(name) for name in fixed}))
