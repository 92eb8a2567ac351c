"""What a script that is not ours trains: its parameters by name, and how the script saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...core.errors import LabError
from ...core.files import atomic_file
from ..script.source import NotRecognised
from .files import stored_tensors
from .run import HostRun

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")  # accelerate's names of what gives each process a part of the weights


class TrainedModels:
    """
    The prepared models of a run and their trainable parameters; [`NotRecognised`] if nobody could average those.

    Attributes:
        parameters: All that are trained, once each.
        names: Theirs: the place of the model, and the name in it.
    """

    def __init__(self, run: HostRun):
        self.run = run
        # A script may have the accelerator forget them before its end.
        self._prepared = [*run.accelerator._models]
        _check_run(run)
        named: dict[torch.nn.Parameter, str] = {}
        for place, model in enumerate(run.models):
            if getattr(model, "is_quantized", False):
                raise NotRecognised(f"its {type(model).__name__} is quantised")
            for name, parameter in model.named_parameters():
                if not parameter.is_floating_point():
                    raise NotRecognised(f"its {type(model).__name__} is quantised: {name} is {parameter.dtype}")
                if parameter.requires_grad:
                    named.setdefault(parameter, f"{place}.{name}")
        if not named:
            raise NotRecognised("nothing that it prepares has trainable parameters")
        self.parameters, self.names = [*named], [*named.values()]

    def check_format(self) -> None:
        """Raises [`NotRecognised`] if neither a hook of the script nor its models save what is trained."""
        for model in self.run.models:
            if not self._hooks() and (not hasattr(model, "save_pretrained") or hasattr(model, "peft_config")):
                raise NotRecognised(f"it registers no hook for checkpoints, and its {type(model).__name__} saves no weights")

    def _hooks(self) -> list[Callable[..., None]]:
        """The script's own, which accelerate calls before it saves a checkpoint."""
        hooks = self.run.accelerator._save_model_state_pre_hook.values()
        return [hook for hook in hooks if not str(hook.__module__).startswith(__package__.partition(".")[0])]

    def save(self, folder: Path) -> None:
        """
        As they are now, in the format of what is trained: as `accelerator.save_state` does if the script has hooks, which
        save weights themselves and take them away, or leave them to accelerate.
        """
        from ...averaging.averages import without_config_warnings

        hooks = self._hooks()
        with torch.random.fork_rng(devices=[]), without_config_warnings():
            if hooks:
                self._save_by(hooks, folder)
            for place, model in enumerate([] if hooks else self.run.models):
                cast(Any, model).save_pretrained(folder / f"model_{place}" if place else folder)

    def _save_by(self, hooks: list[Callable[..., None]], folder: Path) -> None:
        from accelerate.utils import SAFE_WEIGHTS_NAME, save

        get_state_dict = self.run.accelerator.get_state_dict
        weights = [get_state_dict(model, unwrap=False) for model in self._prepared]
        models = {id(state): model for state, model in zip(weights, self._prepared, strict=True)}
        for hook in hooks:
            hook([*self._prepared], weights, str(folder))
        for place, state in enumerate(weights):
            # By the model's own names: in a checkpoint, they begin with those of the wrapper for several processes.
            left = get_state_dict(models[id(state)]) if id(state) in models else state
            name = SAFE_WEIGHTS_NAME.replace(".", f"_{place}.") if place else SAFE_WEIGHTS_NAME
            save(left, folder / name, safe_serialization=True)

    def missing_from(self, folder: Path) -> list[str]:
        """
        Names of the trained parameters whose values, as they are now, are in no file of a folder.

        A script may save by other names, so that a tensor of the same shape and values counts, each once; one whose name
        ends in the parameter's is looked at first.
        """
        stored = [*stored_tensors(folder)]
        missing = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            own = name.partition(".")[2]
            found = [place for place, (_, shape, _) in enumerate(stored) if shape == parameter.shape]
            found.sort(key=lambda place: not f".{stored[place][0]}".endswith(f".{own}"))
            match = next((place for place in found if _holds(stored[place][2](), parameter)), None)
            if match is None:
                missing.append(name)
            else:
                stored.pop(match)
        return missing

    def not_finite(self) -> list[str]:
        """Names of the trained parameters that hold a number that is not finite."""
        named = zip(self.names, self.parameters, strict=True)
        return [name for name, parameter in named if not bool(torch.isfinite(parameter).all())]

    def save_tensors(self, path: Path, tensors: list[torch.Tensor], about: dict[str, str]) -> None:
        """One tensor for each parameter, and what is to be known of them."""
        with atomic_file(path) as temporary:
            save_file(dict(zip(self.names, tensors, strict=True)), temporary, about)

    def load_tensors(self, path: Path) -> tuple[list[torch.Tensor], dict[str, str]]:
        """What [`save_tensors`] wrote, where the parameters are."""
        try:
            with safe_open(path, "pt") as file:
                about, saved = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise LabError(
                f"The average in {path} is damaged ({error}). Resume from another checkpoint, or remove the file: "
                "the average then begins from the weights."
            ) from None
        shapes = {name: value.shape for name, value in zip(self.names, self.parameters, strict=True)}
        if {name: value.shape for name, value in saved.items()} != shapes:
            raise LabError(f"The average in {path} is of other parameters than those that are trained. Leave --ema out.")
        return [saved[name].to(each.device) for name, each in zip(self.names, self.parameters, strict=True)], about


def _holds(stored: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a stored tensor has a parameter's values, in its own dtype."""
    value = parameter.detach().to(stored)
    return stored.is_floating_point() and torch.allclose(stored, value, rtol=0.0, atol=0.0, equal_nan=True)


def _check_run(run: HostRun) -> None:
    from ...averaging.averages import averages_itself

    kind = run.accelerator.distributed_type.value
    if kind in SHARDED:
        raise NotRecognised(f"its models are sharded ({kind}), so no process has all weights")
    if not run.arguments.get("output_dir"):
        raise NotRecognised("it has no --output_dir for the average")
    if run.arguments.get("train_text_encoder_ti"):
        raise NotRecognised("it puts embeddings back after each update (--train_text_encoder_ti)")
    if len(run.accelerator._optimizers) > 1:
        raise NotRecognised("it has several optimizers, and which of their steps is an update cannot be told")
    if averages_itself(run.optimizer):
        raise NotRecognised(f"{type(run.optimizer).__name__} averages the weights itself")
