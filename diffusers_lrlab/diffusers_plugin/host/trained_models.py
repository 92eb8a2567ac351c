"""The models that a third-party script trains: their parameters by name, and how the script saves them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import SAFE_WEIGHTS_NAME
from diffusers.utils import logging
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...core.errors import LabError
from ...core.files import atomic_file
from ..script.source import NotRecognised
from .run import HostRun

HOOK = "register_save_state_pre_hook"  # accelerate's, by which a script saves its weights itself
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names of strategies that shard the weights


@contextmanager
def _without_config_warnings() -> Iterator[None]:
    """Silences diffusers' warning that settings of an average in config.json look like misspelt arguments of the model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


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
        return [hook for hook in hooks if not str(hook.__module__).startswith(__package__.partition(".")[0])]

    def save(self, folder: Path) -> None:
        """
        Saves the current weights in the script's format.

        If the script has hooks, this does what `accelerator.save_state` does: hooks save weights and remove them from the
        list, or leave them to accelerate.
        """
        hooks = self._hooks()
        with torch.random.fork_rng(devices=[]), _without_config_warnings():
            if hooks:
                self._save_by(hooks, folder)
                return
            for index, model in enumerate(self.run.models):
                cast(Any, model).save_pretrained(folder / f"model_{index}" if index else folder)

    def _save_by(self, hooks: list[Callable[..., None]], folder: Path) -> None:
        from accelerate.utils import save

        get_state_dict = self.run.accelerator.get_state_dict
        weights = [get_state_dict(model, unwrap=False) for model in self._prepared]
        models = {id(state): model for state, model in zip(weights, self._prepared, strict=True)}
        for hook in hooks:
            hook([*self._prepared], weights, str(folder))
        for index, state in enumerate(weights):
            # By the model's own names: in a checkpoint they start with the wrapper's, such as DDP's.
            left = get_state_dict(models[id(state)]) if id(state) in models else state
            name = SAFE_WEIGHTS_NAME.replace(".", f"_{index}.") if index else SAFE_WEIGHTS_NAME
            save(left, folder / name, safe_serialization=True)

    def how_to_load(self, folder: Path) -> str | None:
        """The call that loads the weights in a folder of [`save`], in Python; `None` if none would."""
        if [*folder.rglob("pytorch_lora_weights.*")]:
            return f"pipeline.load_lora_weights({str(folder)!r})"
        configs = [
            (path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.rglob("config.json"))
        ]
        names = {path: about.get("_class_name") or about.get("architectures", ["AutoModel"])[0] for path, about in configs}
        if names:
            return " and ".join(f"{name}.from_pretrained({str(path)!r})" for path, name in names.items())
        weights = folder / SAFE_WEIGHTS_NAME
        return f"safetensors.torch.load_file({str(weights)!r})" if weights.exists() else None

    def not_finite(self) -> list[str]:
        """The trained parameters with values that are not finite, by name."""
        named = zip(self.names, self.parameters, strict=True)
        return [name for name, parameter in named if not bool(torch.isfinite(parameter).all())]

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
    from ...averaging.averages import averages_itself

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
