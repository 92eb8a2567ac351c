"""An exponential moving average of the weights that a third-party script trains, saved in the script's format."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.utils import logging
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...averaging.averages import EMA, averages_itself
from ...averaging.forms import EMAForm
from ...core.errors import LabError, must_be
from ...core.files import atomic_file, atomic_folder, remove
from ...core.words import counted
from ..host.run import HostRun
from ..host.source import HostScript, NotRecognised, lines_of
from ..installed_hooks import Hook, Host
from .clock import HostClock

_HOOK = "register_save_state_pre_hook"  # accelerate's, by which a script saves its weights itself
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names of strategies that shard the weights
_STATE = Path("lrlab", "ema.safetensors")  # in a checkpoint of the script
BY_NAMES = "average.safetensors"  # beside the files in the script's format


@contextmanager
def _without_config_warnings() -> Iterator[None]:
    """Silences diffusers' warning that settings of an average in config.json look like misspelt arguments of the model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def recognise(script: HostScript) -> str:
    if not script.calls("prepare"):
        raise NotRecognised("it prepares nothing with accelerate, so its trained models are unknown")
    if script.calls("update_ema"):
        raise NotRecognised(f"it keeps an average itself ({lines_of(script.calls('update_ema'))})")
    if script.assigns("index_no_updates"):
        raise NotRecognised("it resets embeddings after each update, which an average would not see")
    if script.calls(_HOOK):
        found = f"its hook for checkpoints saves the trained weights ({lines_of(script.calls(_HOOK))})"
    elif script.calls("save_pretrained") and not script.calls("save_attn_procs"):
        found = "save_pretrained saves the models that it trains"
    else:
        raise NotRecognised(f"how it saves its weights is unknown: it has no {_HOOK} and calls no save_pretrained")
    return found + (", without --use_ema" if script.mentions("use_ema") else "")


def make(host: Host) -> Hook:
    return EMAHook(host.script, host.hooks["clock"], host.options.ema)


class EMAHook:
    """
    Averages all trainable parameters after each update, in float32. The average is written to `lrlab/ema` in the script's
    output folder after the last update, since scripts delete their models before they end; or at the end, if the last update
    was another one than expected. Checkpoints contain its state, from which a resume goes on.
    """

    def __init__(self, script: HostScript, clock: HostClock, spec: str):
        self.form = EMAForm.of(spec).without_snapshots("--ema", spec)
        if self.form.lacks_images:
            hint = "the batch size x accumulation x processes, as in half_life:images_per_update=64"
            raise must_be("--ema", spec, "an average with images_per_update, since it counts images", hint)
        self.script, self.clock, self.run = script, clock, clock.run
        recognise(script)
        self.option, self.is_active = f"--ema {self.form.name}", True
        self.trained: Any = None  # the models, once they are prepared
        self.average: EMA | None = None  # none before that, and after a resume without it
        self.num_seen = 0  # updates in the average, including those before a resume
        self.num_written = 0  # updates in the average that was written
        self._registered: Any = None  # the accelerator with our hooks

    def install(self) -> None:
        for event, call in ((self.run.on_prepared, self._begin), (self.run.on_update, self._step)):
            event.append(self.run.unless_refused(self, call))
        self.run.on_end.append(self._finish)

    def _begin(self) -> None:
        """Finds the trained models once there is an optimizer, and refuses those that cannot be averaged."""
        if self.run.optimizer is None or self.num_seen:
            return
        if self.run.arguments.get("use_ema"):
            raise LabError("The script keeps an EMA itself (--use_ema). Remove that or --ema.")
        self.trained = TrainedModels(self.run)
        if not self.script.calls(_HOOK):  # else it may register one later
            self.trained.check_format()
        self._restart()
        accelerator = self.run.accelerator
        if self._registered is not accelerator:
            accelerator.register_save_state_pre_hook(self._save_state)
            accelerator.register_load_state_pre_hook(self._load_state)
            self._registered = accelerator

    def _restart(self) -> EMA:
        """The average is the weights as they are."""
        self.average = EMA(self.trained.parameters, self.form, dtype=torch.float32)
        return self.average

    def _step(self) -> None:
        if not self.num_seen:
            self.trained.check_format()
        average = self.average or self._restart()  # after a resume from a checkpoint without it
        self.num_seen += 1
        average.advance(self.num_seen)
        done = self.clock.update if self.clock.counts else self.num_seen  # the first has those before a resume without it
        if done + self.run.num_skipped == self.clock.count_updates():
            self._finish()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, str]:
        return {"num_updates": str(self.num_seen), "form": str(self.form)}

    def _save_state(self, models: Any, weights: Any, folder: str) -> None:
        """Adds the average to a checkpoint of the script, which may be saved by one process alone."""
        if self.is_active and self.average is not None and self.run.accelerator.is_main_process:
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
        if metadata["form"] != str(self.form):
            self.run.warn(f"the average was {metadata['form']} before, and continues as {self.form}.")
        self._restart().shadow_params = saved
        self.num_seen = int(metadata["num_updates"])

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.run.lab_folder / "ema"

    def _finish(self) -> None:
        """In all processes: writes the average in the script's format, and by names."""
        if not self.is_active or self.average is None or self.num_written == self.num_seen:
            return
        if self.run.accelerator.is_main_process:
            with self.average.swapped_in(), atomic_folder(self.folder) as temporary:
                self._save_as_script(temporary)
                self.trained.save_tensors(temporary / BY_NAMES, self.average.shadow_params, self._metadata())
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
        if not self.num_seen:
            return f"{self.option}: no update was seen, so nothing was averaged."
        if not self.num_written:
            return f"{self.option}: the average was not written, since the script did not end. A resume continues it."
        ways = f"by the names of parameters with safetensors.torch.load_file({str(self.folder / BY_NAMES)!r})"
        if own := self.trained.how_to_load(self.folder):
            ways = f"with {own}, or {ways}"
        return f"{self.option}: the average of {counted(self.num_written, 'update')} is in {self.folder}. Load it {ways}."


# --- the trained models -------------------------------------------------------------------------------------------------


class TrainedModels:
    """The prepared models of a run and their trainable parameters; raises [`NotRecognised`] if these cannot be averaged."""

    def __init__(self, run: HostRun):
        self.run = run
        self._prepared = [*run.accelerator._models]  # a script may clear the accelerator's list before its end
        _check_run(run)
        named: dict[torch.nn.Parameter, str] = {}
        for index, model in enumerate(run.models):
            quantized = f"its {type(model).__name__} is quantized"
            if getattr(model, "is_quantized", False):
                raise NotRecognised(quantized)
            for name, parameter in model.named_parameters():
                if not parameter.is_floating_point():
                    raise NotRecognised(f"{quantized}: {name} is {parameter.dtype}")
                if parameter.requires_grad:
                    named.setdefault(parameter, f"{index}.{name}")
        if not named:
            raise NotRecognised("nothing that it prepares has trainable parameters")
        # Each parameter once; a name is the index of the model, a dot, and the name in the model.
        self.parameters, self.names = [*named], [*named.values()]

    def check_format(self) -> None:
        """Raises [`NotRecognised`] if neither a hook of the script nor its models save the trained weights."""
        for model in self.run.models:
            if not self._hooks() and (not hasattr(model, "save_pretrained") or hasattr(model, "peft_config")):
                raise NotRecognised(f"it registers no hook for checkpoints, and its {type(model).__name__} saves no weights")

    def _hooks(self) -> list[Callable[..., None]]:
        """The script's own hooks, which accelerate calls before it saves a checkpoint."""
        hooks = self.run.accelerator._save_model_state_pre_hook.values()
        return [hook for hook in hooks if hook.__module__ != __name__]

    def save(self, folder: Path) -> None:
        """Saves the current weights in the script's format: by its hooks, else by the models themselves."""
        hooks = self._hooks()
        with torch.random.fork_rng(devices=[]), _without_config_warnings():
            if not hooks:
                for index, model in enumerate(self.run.models):
                    cast(Any, model).save_pretrained(folder / f"model_{index}" if index else folder)
                return
            weights = [self.run.accelerator.get_state_dict(model, unwrap=False) for model in self._prepared]
            for hook in hooks:  # which take what they save out of the list
                hook([*self._prepared], weights, str(folder))

    def how_to_load(self, folder: Path) -> str | None:
        """The call that loads the weights in a folder of [`save`], in Python; `None` if none would."""
        if [*folder.rglob("pytorch_lora_weights.*")]:
            return f"pipeline.load_lora_weights({str(folder)!r})"
        configs = [
            (path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.rglob("config.json"))
        ]
        names = {path: about.get("_class_name") or about.get("architectures", ["AutoModel"])[0] for path, about in configs}
        return " and ".join(f"{name}.from_pretrained({str(path)!r})" for path, name in names.items()) or None

    def save_tensors(self, path: Path, tensors: list[torch.Tensor], metadata: dict[str, str]) -> None:
        """Writes one tensor for each parameter, by its name."""
        with atomic_file(path) as temporary:
            save_file(dict(zip(self.names, tensors, strict=True)), temporary, metadata)

    def load_tensors(self, path: Path) -> tuple[list[torch.Tensor], dict[str, str]]:
        """The tensors and metadata of [`save_tensors`], on the devices of the parameters."""
        try:
            with safe_open(path, "pt") as file:
                metadata, saved = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise LabError(
                f"The average in {path} is damaged ({error}). Resume from another checkpoint, or remove the file: the "
                "average then starts from the weights."
            ) from None
        shapes = {name: value.shape for name, value in zip(self.names, self.parameters, strict=True)}
        if {name: value.shape for name, value in saved.items()} != shapes:
            raise LabError(f"The average in {path} does not have the parameters that are trained. Remove --ema.")
        return [saved[name].to(each.device) for name, each in zip(self.names, self.parameters, strict=True)], metadata


def _check_run(run: HostRun) -> None:
    strategy = run.accelerator.distributed_type.value
    if strategy in _SHARDED:
        raise NotRecognised(f"its models are sharded ({strategy}), so no process has all weights")
    if not run.arguments.get("output_dir"):
        raise NotRecognised("it has no --output_dir for the average")
    if run.arguments.get("train_text_encoder_ti"):
        raise NotRecognised("it resets embeddings after each update (--train_text_encoder_ti)")
    if len(run.accelerator._optimizers) > 1:
        raise NotRecognised("it has several optimizers, so the end of an update is unknown")
    if averages_itself(run.optimizer):
        raise NotRecognised(f"{type(run.optimizer).__name__} averages the weights itself")
