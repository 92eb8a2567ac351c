"""Exact resume of a third-party script: position in the data, and all random states, to the same bits."""

import functools
import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import LabError
from ...core.files import atomic_folder, write_text
from ...core.words import counted
from ..host.files import problem_with
from ..host.hook import Hook, Host, StatefulHook
from ..host.trained_models import TrainedModels
from ..host.watched_loader import WatchedLoader
from ..script.source import HostScript, NotRecognised, lines_of
from .clock import HostClock, clock_of

FILE = "lrlab_resume.json"
_VERSION = 1
_UPDATES_KEPT = 16  # by which other processes may be ahead of the one that writes checkpoints


def recognise(script: HostScript) -> str:
    saves = script.calls("save_state")
    missing = [name for name in ("save_state", "load_state") if not script.calls(name)]
    if others := [each for each in script.local_modules if missing and any(map(each.calls, missing))]:
        files = ", ".join(os.path.relpath(each.path, os.path.dirname(script.path)) for each in others)
        raise NotRecognised(
            f"it writes or reads its checkpoints in another file ({files}), where the position in the data is not tracked"
        )
    if missing:
        raise NotRecognised("it does not both write checkpoints by accelerator.save_state and read them by load_state")
    if skips := script.calls("skip_first_batches"):
        raise NotRecognised(f"it skips batches of an epoch by skip_first_batches ({lines_of(skips)})")
    if script.calls("WebLoader"):
        raise NotRecognised("its data are a stream (WebLoader), whose order only its source knows")
    own = ", and so are the batches that it drops itself" if script.assigns("resume_step") else ""
    cached = f"; not with {', '.join(script.indexed_by_step)} in use" if script.indexed_by_step else ""
    return f"checkpoints of accelerator.save_state ({lines_of(saves)}) are completed{own}{cached}"


def make(host: Host) -> Hook:
    return ResumeHook(host.script, clock_of(host), host.hooks)


class ResumeHook:
    """
    Adds `lrlab_resume.json` to the checkpoints of a script, and resumes from it.

    Most scripts write checkpoints in their first process alone. So the others put their state at each update into the
    process group's store, where the first one finds it.
    """

    def __init__(self, script: HostScript, clock: HostClock, hooks: Mapping[str, Hook]):
        recognise(script)
        self.script, self.clock, self.run = script, clock, clock.run
        self._hooks = hooks  # all of the run by name, including later ones: states of [`StatefulHook`]s are saved
        self.loader: WatchedLoader | None = None
        self.is_active = True
        self.num_updates = 0  # with updates that a gradient scaler skipped, as scripts count
        self.num_seen = self.num_written = 0  # loaders, and checkpoints
        self.resumed_at: int | None = None
        self._lacks: list[str] | None = None  # trained parameters that are missing in checkpoints, by name
        self._has_warned = False

    def install(self) -> None:
        from accelerate import Accelerator

        self.run.on_prepared.append(self._watch_loader)
        self.run.on_step.append(self._count_update)

        def save_whole(save_state: Any, accelerator: Any, output_dir: Any = None, /, *args: Any, **kwargs: Any) -> Any:
            save = functools.partial(save_state, accelerator)
            if not self.is_active or self.loader is None:
                return save(output_dir, *args, **kwargs)
            if not accelerator.is_main_process:
                # Other processes write only their random states, which are in the first one's file.
                with tempfile.TemporaryDirectory() as folder:
                    return save(folder, *args, **kwargs) and output_dir
            return self._save(self.loader, save, output_dir, *args, **kwargs)

        def load_all(load_state: Any, accelerator: Any, input_dir: Any = None, /, *args: Any, **kwargs: Any) -> Any:
            loaded = load_state(accelerator, input_dir, *args, **kwargs)
            if self.is_active and self.loader is None:
                self._refuse("it reads its checkpoint before its loader is prepared")
            elif self.is_active:
                self._load(Path(input_dir or ""))
            return loaded

        self.run.patches.wrap(Accelerator, "save_state", save_whole)
        self.run.patches.wrap(Accelerator, "load_state", load_all)

    def _watch_loader(self) -> None:
        loader, accelerator = self.run.training_loader, self.run.accelerator
        if not self.is_active or loader is None or self.loader is not None and self.loader.loader is loader:
            return
        if accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            self._refuse(f"its checkpoints are not accelerate's own ({accelerator.distributed_type})")
        elif accelerator.num_processes > 1 and len(accelerator._optimizers) > 1:
            self._refuse("it has several optimizers in several processes, so the end of an update is unknown")
        else:
            try:
                self.loader = WatchedLoader(self.script, loader, self._is_at_end)
                self.num_seen = 1
            except NotRecognised as reason:
                self._refuse(str(reason))

    def _refuse(self, reason: str) -> None:
        self.is_active = False
        self.run.refuse("--exact_resume", NotRecognised(reason))

    def _is_at_end(self) -> bool:
        return self.num_updates == self.clock.count_updates()

    # --- saved --------------------------------------------------------------------------------------------------------

    def _stateful(self) -> dict[str, StatefulHook]:
        return {name: hook for name, hook in self._hooks.items() if isinstance(hook, StatefulHook)}

    def _state(self, loader: WatchedLoader) -> dict[str, Any]:
        """The state of this process."""
        hooks = {name: hook.state_dict(self._is_at_end()) for name, hook in self._stateful().items()}
        return {"micro_batches": self.run.accelerator.step, "loader": loader.state(), "hooks": hooks}

    def _count_update(self) -> None:
        self.num_updates += 1
        accelerator = self.run.accelerator
        if accelerator.is_main_process or self.loader is None or not self.is_active:
            return
        state, store = self._state(self.loader), _store()
        store.set(self._key(accelerator.process_index, self.num_updates), pickle.dumps(state))
        store.delete_key(self._key(accelerator.process_index, self.num_updates - _UPDATES_KEPT))
        self.loader.continue_from(state["loader"])

    def _key(self, process: int, update: int) -> str:
        return f"lrlab/resume/{process}/{update}"

    def _save(self, loader: WatchedLoader, save: Any, output_dir: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator = self.run.accelerator
        if not accelerator.sync_gradients:
            self.run.warn(
                f"--exact_resume: checkpoint {output_dir} is written between the micro-batches of an update and lacks their "
                "gradients. A resume from it is not exact."
            )
            return save(output_dir, *args, **kwargs)
        mine = self._state(loader)
        others = [_store().get(self._key(rank, self.num_updates)) for rank in range(1, accelerator.num_processes)]
        state = {"version": _VERSION, "updates": self.num_updates, "facts": self._facts(loader)}
        state |= {"processes": [mine, *map(pickle.loads, others)]}
        state |= {"schedules": [watched.scheduler.last_epoch for watched in self.clock.outside_checkpoints()]}
        if output_dir is None:  # accelerate numbers them itself
            folder = Path(save(None, *args, **kwargs))
            write_text(folder / FILE, json.dumps(state))
        else:
            folder = Path(output_dir)
            with atomic_folder(folder) as unfinished:  # scripts would resume from an incomplete checkpoint
                save(str(unfinished), *args, **kwargs)
                (unfinished / FILE).write_text(json.dumps(state), encoding="utf-8")
        loader.continue_from(mine["loader"])
        self.num_written += self._is_whole(folder)
        return output_dir or str(folder)

    def _is_whole(self, folder: Path) -> bool:
        """Whether a checkpoint is readable and complete; the first that is not is reported."""
        problem = problem_with(folder / FILE) or self._missing_weights(folder)
        if problem and not self._has_warned:
            self._has_warned = True
            self.run.warn(f"--exact_resume: {problem}. A resume from it is not exact.")
        return not problem

    def _missing_weights(self, folder: Path) -> str | None:
        """Compares weights in the first checkpoint only: a script saves the same in all of a run."""
        if self._lacks is None:
            try:
                self._lacks = TrainedModels(self.run).missing_from(folder)
            except NotRecognised:  # some models cannot be compared
                self._lacks = []
        if not self._lacks:
            return None
        return f"checkpoint {folder} lacks the weights of {len(self._lacks)} trained parameters, such as {self._lacks[0]}"

    def _facts(self, loader: WatchedLoader) -> dict[str, int]:
        return {"processes": self.run.accelerator.num_processes} | loader.facts()

    # --- restored -----------------------------------------------------------------------------------------------------

    def _load(self, folder: Path) -> None:
        assert self.loader is not None
        path = folder / FILE
        if not path.exists():
            text = f"checkpoint {folder} was written without --exact_resume, so the data of its epoch start again"
            if self.run.strict:
                raise LabError(f"{text[0].upper()}{text[1:]}. Resume from it without --strict.")
            self.run.warn(f"{text}. A resume from later checkpoints is exact.")
            self.num_updates = self.clock.update if self.clock.counts else 0
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["version"] != _VERSION:
            raise LabError(
                f"{path} was written by another version of diffusers_lrlab. Resume with that version, or without "
                "--exact_resume."
            )
        for name, number in self._facts(self.loader).items():
            if number != saved["facts"][name]:
                raise LabError(
                    f"--exact_resume: the number of {name} was {saved['facts'][name]} when the checkpoint was written, and "
                    f"is {number} now. Resume with the same number, or without --exact_resume."
                )
        mine = saved["processes"][self.run.accelerator.process_index]
        self.num_updates = self.resumed_at = saved["updates"]
        self.run.accelerator.step = mine["micro_batches"]
        self.loader.resumed = mine["loader"]
        for watched, step in zip(self.clock.outside_checkpoints(), saved.get("schedules", []), strict=False):
            watched.move_to(step)
        for name, hook in self._stateful().items():
            if name in mine["hooks"]:  # the first process has what is the same in all
                hook.load_state_dict(saved["processes"][0]["hooks"][name] | mine["hooks"][name])
        if self._is_at_end():
            self._warn_of_no_epoch(folder)

    def _warn_of_no_epoch(self, folder: Path) -> None:
        reason = None
        if self.script.saves_within_epochs:
            reason = "saves its result within its epochs, of which none is left. If the result is missing"
        elif name := self.script.epoch_used_later:
            reason = f"uses `{name}` after its epochs, of which none may be left. If it fails because of that"
        if reason:
            remedy = "remove this checkpoint and resume from the one before."
            self.run.warn(f"{folder} was written after the last update, and this script {reason}, {remedy}")

    def report(self) -> str:
        if not self.is_active:
            return ""
        if self.loader is None:
            return "--exact_resume: no loader was prepared with an optimizer, so checkpoints are the script's own."
        if not self.num_written and self.resumed_at is None and not self._has_warned:
            return "--exact_resume: no checkpoint was written or read."
        text = f"--exact_resume: {counted(self.num_written, 'checkpoint')} written from which a resume is exact."
        if self.resumed_at is None:
            return text
        skipped = self.loader.num_skipped
        data = f", skipping {counted(skipped, 'batch')} of its epoch" if skipped else ""
        return f"{text} It resumed after update {self.resumed_at}{data}."


def _store() -> Any:
    """The key-value store of the process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
