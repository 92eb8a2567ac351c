"""LoRA by `peft`: small matrices beside frozen layers, which alone are trained, averaged and checkpointed.

They are saved in the format of diffusers, `pytorch_lora_weights.safetensors`: names as in `peft`, behind the model's name in
its pipeline, and the configuration of `peft` in the metadata.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import LabError, must_be
from ..core.words import counted
from ..models.start_weights import LORA_FILE

if TYPE_CHECKING:
    import torch

    from .config import ResolvedConfig

BASE = "lrlab/base"  # in the folder of a run: the frozen weights, with which it is resumed
_ADAPTER = "default"  # peft's name for it
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # as in diffusers' scripts
_METADATA = "lora_adapter_metadata"  # diffusers' key
_STATE = "ema"  # the key of an average's state in the metadata


def lora_targets(model: Any, patterns: str | None) -> list[str]:
    """Names of the layers that get a LoRA; a `LabError` if a pattern matches none."""
    from torch import nn

    layers = [
        name
        for name, module in model.named_modules()
        # peft cannot merge into grouped convolutions
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and getattr(module, "groups", 1) == 1
    ]

    def matching(pattern: str) -> set[str]:
        return {name for name in layers if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}")}

    if patterns is None:
        found = set().union(*map(matching, _ATTENTION)) or set(layers)
    else:
        found = set()
        for pattern in map(str.strip, patterns.split(",")):
            if not (matched := matching(pattern)):
                some = ", ".join(layers[:3] + layers[-2:])
                hint = f"{type(model).__name__} has {counted(len(layers), 'such layer')}, among them {some}"
                raise must_be(
                    "--lora_target_modules", patterns, "names of linear or convolutional layers", hint, got=pattern
                )
            found |= matched
    if not found:
        raise LabError(
            f"--lora_rank: a {type(model).__name__} has no linear or convolutional layer for a LoRA. Leave it out."
        )
    return [name for name in layers if name in found]


def add_lora(model: Any, config: ResolvedConfig) -> Any:
    """The model with a LoRA, if one is requested, and all else frozen."""
    if config.lora_rank is None:
        return model
    from peft import LoraConfig, inject_adapter_in_model

    names = lora_targets(model, config.lora_target_modules)
    alpha: Any = config.lora_alpha
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # as scripts of diffusers save it
        init_lora_weights="gaussian",
        target_modules="|".join(map(re.escape, names)),  # an expression for whole names; a list would be of their ends
    )
    return inject_adapter_in_model(lora, model, adapter_name=_ADAPTER)


def has_lora(model: Any) -> bool:
    return _ADAPTER in vars(model).get("peft_config", {})


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that optimizer, average and checkpoints contain, by name: all of a model, or those of its LoRA."""
    named = dict(model.named_parameters())
    return {name: value for name, value in named.items() if value.requires_grad} if has_lora(model) else named


def lora_layers(model: Any) -> dict[str, Any]:
    """The layers with a LoRA, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def saved_name(name: str) -> str:
    """The name of a parameter of a LoRA in its file, without the model's in front."""
    return ".".join(name.rsplit(f".{_ADAPTER}.", 1))


def base_weights(model: Any, merged: bool = False) -> dict[str, torch.Tensor]:
    """The weights of the model without its LoRA, to the bit, or with the LoRA added to them; by the names of its class."""
    import torch

    adapter = trained_parameters(model)
    kept = {name: value for name, value in model.state_dict().items() if name not in adapter}
    weights = {name.replace(".base_layer.", "."): value for name, value in kept.items()}
    if merged:
        with torch.no_grad():
            for name, layer in lora_layers(model).items():
                whole = weights[f"{name}.weight"] + layer.get_delta_weight(_ADAPTER)
                weights[f"{name}.weight"] = whole.contiguous()
    return weights


@dataclass(frozen=True)
class LoraWeights:
    """The weights of a LoRA, to be saved as diffusers does."""

    tensors: dict[str, torch.Tensor]  # by the name that they are saved under
    metadata: dict[str, str]

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / LORA_FILE, metadata=self.metadata)


def lora_weights(
    model: Any, component: str, values: list[torch.Tensor] | None = None, state: dict[str, Any] | None = None
) -> LoraWeights:
    """
    A copy of the LoRA of a model on the host, or of its average: `values`, in the order of the parameters, with the `state`
    of the average.
    """
    from .host_copies import on_host

    trained = trained_parameters(model)
    names = [f"{component}.{saved_name(name)}" for name in trained]
    tensors = on_host(dict(zip(names, trained.values() if values is None else values, strict=True)))
    settings = model.peft_config[_ADAPTER].to_dict()
    settings = {f"{component}.{key}": sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    metadata = {"format": "pt", _METADATA: json.dumps(settings, indent=2, sort_keys=True)}
    if state is not None:
        metadata[_STATE] = json.dumps(state)
    return LoraWeights({name: value.detach().contiguous() for name, value in tensors.items()}, metadata)


def read_lora(folder: Path, model: Any, component: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The weights of a LoRA in the order of a model's parameters, and the state of an average."""
    from safetensors import safe_open

    with safe_open(folder / LORA_FILE, "pt") as file:
        values = [file.get_tensor(f"{component}.{saved_name(name)}") for name in trained_parameters(model)]
        return values, json.loads((file.metadata() or {}).get(_STATE, "{}"))


def load_lora(folder: Path, model: Any, component: str) -> None:
    """Gives a model the weights of a LoRA, in place."""
    import torch

    values, _ = read_lora(folder, model, component)
    with torch.no_grad():
        for parameter, value in zip(trained_parameters(model).values(), values, strict=True):
            parameter.copy_(value)
