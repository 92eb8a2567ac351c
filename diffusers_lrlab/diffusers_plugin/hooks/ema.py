"""An exponential moving average of the weights that a third-party script trains, saved in the script's format."""

from pathlib import Path
from typing import Any

import torch

from ...averaging.averages import EMA
from ...averaging.forms import EMAForm
from ...core.errors import LabError
from ...core.files import atomic_folder, remove
from ...core.words import counted
from ..host.hook import Hook, Host
from ..host.trained_models import HOOK, TrainedModels
from ..script.source import HostScript, NotRecognised, lines_of
from .clock import HostClock, clock_of

_STATE = Path("lrlab", "ema.safetensors")  # in a checkpoint of the script
BY_NAMES = "average.safetensors"  # beside the files in the script's format


def recognise(script: HostScript) -> str:
    if not script.calls("prepare"):
        raise NotRecognised("it prepares nothing with accelerate, so its trained models are unknown")
    if script.calls("update_ema"):
        raise NotRecognised(f"it keeps an average itself ({lines_of(script.calls('update_ema'))})")
    if script.assigns("index_no_updates"):
        raise NotRecognised("it resets embeddings after each update, which an average would not see")
    if script.calls(HOOK):
        found = f"its hook for checkpoints saves the trained weights ({lines_of(script.calls(HOOK))})"
    elif script.calls("save_pretrained") and not script.calls("save_attn_procs"):
        found = "save_pretrained saves the models that it trains"
    else:
        raise NotRecognised(f"how it saves its weights is unknown: it has no {HOOK} and calls no save_pretrained")
    return found + (", without --use_ema" if script.mentions("use_ema") else "")


def make(host: Host) -> Hook:
    return EMAHook(host.script, clock_of(host), host.options.ema)


class EMAHook:
    """
    Averages all trainable parameters after each update, in float32. The average is written to `lrlab/ema` in the script's
    output folder after the last update, since scripts delete their models before they end; or at the end, if the last update
    was another one than expected. Checkpoints contain its state, from which a resume goes on.
    """

    def __init__(self, script: HostScript, clock: HostClock, spec: str):
        self.form = EMAForm.of(spec).without_snapshots("--ema", spec)
        self.script, self.clock, self.run = script, clock, clock.run
        recognise(script)
        self.is_active = True
        self.trained: Any = None  # the models, once they are prepared
        self.average: EMA | None = None  # none before that, and after a resume without it
        self.num_seen = 0  # updates in the average, including those before a resume
        self.num_written = 0  # updates in the average that was written
        self.not_finite: list[str] = []  # names of tensors in the written average
        self._registered: Any = None  # the accelerator with our hooks

    def install(self) -> None:
        self.run.on_prepared.append(self._begin)
        self.run.on_update.append(self._step)
        self.run.on_end.append(self._finish)

    def _begin(self) -> None:
        """Finds the trained models once there is an optimizer, and refuses those that cannot be averaged."""
        if not self.is_active or self.run.optimizer is None or self.num_seen:
            return
        if self.run.arguments.get("use_ema"):
            raise LabError("The script keeps an EMA itself (--use_ema). Remove that or --ema.")
        try:
            self.trained = TrainedModels(self.run)
            if not self.script.calls(HOOK):  # else it may register one later
                self.trained.check_format()
        except NotRecognised as reason:
            self._refuse(reason)
            return
        if self.form.lacks_images and (images := self.run.images_per_update(f"--ema {self.form.name}")) is not None:
            self.form = self.form.with_images(images)
        self._restart()
        accelerator = self.run.accelerator
        if self._registered is not accelerator:
            accelerator.register_save_state_pre_hook(self._save_state)
            accelerator.register_load_state_pre_hook(self._load_state)
            self._registered = accelerator

    def _refuse(self, reason: NotRecognised) -> None:
        self.is_active, self.average = False, None
        self.run.refuse("--ema", reason)

    def _restart(self) -> None:
        """The average is the weights as they are."""
        self.average = EMA(self.trained.parameters, self.form, dtype=torch.float32)

    def _step(self) -> None:
        if not self.is_active:
            return
        if not self.num_seen:
            try:
                self.trained.check_format()
            except NotRecognised as reason:
                self._refuse(reason)
                return
        if self.average is None:  # of a resume from a checkpoint without it
            self._restart()
        assert self.average is not None
        if self.form.lacks_images:  # its data are prepared apart from the models
            self.form = self.average.form = self.form.with_images(self.run.must_know_images(f"--ema {self.form.name}"))
        self.num_seen += 1
        self.average.advance(self.num_seen)
        done = self.clock.update if self.clock.counts else self.num_seen  # the first has those before a resume without it
        if done + self.run.num_skipped == self.clock.count_updates():
            self._finish()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, str]:
        return {"num_updates": str(self.num_seen), "form": str(self.form)}

    def _save_state(self, models: Any, weights: Any, folder: str) -> None:
        """Adds the average to a checkpoint of the script, which may be saved by one process alone."""
        if self.average is not None and self.run.accelerator.is_main_process:
            self.trained.save_tensors(Path(folder) / _STATE, self.average.shadow_params, self._metadata())

    def _load_state(self, models: Any, folder: str) -> None:
        """Loads the average, before the script's weights."""
        if not self.is_active:
            return
        path = Path(folder) / _STATE
        if not path.exists():
            self.num_seen, self.average = 0, None
            self.run.warn(
                "the checkpoint has no average (it was made without --ema), so the average starts from the weights."
            )
            return
        saved, metadata = self.trained.load_tensors(path)
        self._restart()
        assert self.average is not None
        if metadata["form"] != str(self.form):
            self.run.warn(f"the average was {metadata['form']} before, and continues as {self.form}.")
        self.average.shadow_params = saved
        self.num_seen = int(metadata["num_updates"])

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.run.lab_folder / "ema"

    def _finish(self) -> None:
        """In all processes: writes the average in the script's format, and by names."""
        if self.average is None or self.num_written == self.num_seen:
            return
        if self.run.accelerator.is_main_process:
            with self.average.swapped_in(), atomic_folder(self.folder) as temporary:
                self._save_as_script(temporary)
                self.trained.save_tensors(temporary / BY_NAMES, self.average.shadow_params, self._metadata())
                self.not_finite = self.trained.not_finite()
        self.num_written = self.num_seen

    def _save_as_script(self, folder: Path) -> None:
        try:
            self.trained.save(folder)
        except Exception as error:  # of a hook whose script has deleted its models
            remove(folder)
            folder.mkdir()
            self.run.warn(f"--ema: the script's hook for checkpoints failed ({error}), so only {BY_NAMES} is written.")

    def report(self) -> str:
        if not self.is_active:
            return ""
        option = f"--ema {self.form.name}"
        if not self.num_seen:
            return f"{option}: no update was seen, so nothing was averaged."
        if not self.num_written:
            return (
                f"{option}: the average was not written, since the script did not end. A resume from a checkpoint goes on."
            )
        ways = f"by the names of parameters with safetensors.torch.load_file({str(self.folder / BY_NAMES)!r})"
        if own := self.trained.how_to_load(self.folder):
            ways = f"with {own}, or {ways}"
        text = f"{option}: the average of {counted(self.num_written, 'update')} is in {self.folder}. Load it {ways}."
        if self.not_finite:
            tensors = f"{len(self.not_finite)} of its {counted(len(self.trained.names), 'tensor')}"
            text += f" It cannot be used: {tensors} hold values that are not finite, such as {self.not_finite[0]}."
        return text
