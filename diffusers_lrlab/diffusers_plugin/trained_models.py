"""What a script that is not ours trains: its parameters by name, and how the script saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import LabError
from ..core.files import atomic_file
from .host_run import HostRun
from .host_script import NotRecognised

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
        """As they are now, in the format of what is trained: by the script's own hooks if it has any."""
        from ..averaging.averages import without_config_warnings

        hooks = self._hooks()
        with torch.random.fork_rng(devices=[]), without_config_warnings():
            # Hooks take away the weights of models that they save.
            weights = [self.run.accelerator.get_state_dict(model, unwrap=False) for model in self._prepared if hooks]
            for hook in hooks:
                hook([*self._prepared], weights, str(folder))
            for place, model in enumerate([] if hooks else self.run.models):
                cast(Any, model).save_pretrained(folder / f"model_{place}" if place else folder)
        if next(folder.iterdir(), None) is None:
            self.run.warn("the script's hook for checkpoints saved nothing where the average should be.")

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


def _check_run(run: HostRun) -> None:
    from ..averaging.averages import averages_itself

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
