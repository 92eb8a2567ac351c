"""Configurations and weights of models: those of a pipeline or of a model, in a folder or on the Hub."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import LabError, must_be
from ..core.files import expanded, is_plain_name, read_utf8
from ..core.manifest import file_sums, refuse_damaged

OPTION = "--pretrained_model_name_or_path"
_LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name for it
_STEM = "diffusion_pytorch_model"
# Patterns of weights, the preferred ones first; variants such as .fp16. match none of them.
_WEIGHTS = (
    (f"{_STEM}.safetensors", f"{_STEM}-*.safetensors", f"{_STEM}.safetensors.index.json"),
    (f"{_STEM}.bin", f"{_STEM}-*.bin", f"{_STEM}.bin.index.json"),
)
# The state of an average in the config.json that diffusers' `EMAModel` saves; no arguments of the model.
_STATE_OF_EMA = {"decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma", "power"}
_FACTS = ("model_index.json", "config.json", "*/config.json", "scheduler/*.json", _LORA_FILE)
_RECORDS = ("lrlab/run.json", "trainer.json")  # of a run, of a checkpoint


@dataclass(frozen=True)
class StartWeights:
    """
    The configuration and the weights of a model, found and verified.

    Args:
        name_or_path (`str`): As given.
        commit (`str`, *optional*): Of the Hub.
        sha256 (`str`): Of the file of weights; of several files, of their sums in the order of their names.
        config (`dict`): The model's configuration.
        folder (`str`, *optional*): The configuration and the weights; `None` if a checkpoint has the weights.
    """

    name_or_path: str
    commit: str | None
    sha256: str
    config: dict[str, Any] = field(repr=False, compare=False)
    folder: str | None = field(compare=False)

    @property
    def facts(self) -> dict[str, Any]:
        """For records and checkpoints."""
        return {"name_or_path": self.name_or_path, "commit": self.commit, "sha256": self.sha256}

    def load_into(self, model: Any) -> None:
        """Gives a model the weights, unless a checkpoint has them."""
        if self.folder is not None:
            model.load_state_dict(self.read(type(model)))

    def read(self, model_class: Any) -> dict[str, Any]:
        """The weights, in float32; a `LabError` unless they are exactly those of such a model."""
        try:
            loaded, found = model_class.from_pretrained(self.folder, output_loading_info=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            hint = "Hint: restore them, or start from others."
            raise LabError(f"{OPTION} {self.name_or_path!r}: its weights cannot be loaded: {reason} {hint}") from None
        for problem in ("missing", "unexpected", "mismatched"):
            if names := found.get(f"{problem}_keys"):
                wanted = f"the whole weights of a {model_class.__name__} with its config.json"
                hint = f"{problem}: {', '.join(map(str, [*names][:3]))}" + (", ..." if len(names) > 3 else "")
                raise must_be(OPTION, self.name_or_path, wanted, hint, got="others")
        return loaded.state_dict()


def find_start_weights(name_or_path: str, cache_dir: str | None, class_name: str, component: str) -> StartWeights:
    """
    The weights of a model of a class in a folder or on the Hub (`USER/NAME` or `USER/NAME@REVISION`), whose files are
    downloaded. From a pipeline, they are those of the part with this class, preferably the one named `component`.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        top, commit = path, None
    else:
        name_or_path, _, revision = name_or_path.partition("@")
        top = _download(name_or_path, revision or None, cache_dir, _FACTS)
        commit = top.name
    part = _part(top, name_or_path, class_name, component)
    if commit is not None:
        inside = "" if part == top else f"{part.name}/"
        for patterns in _WEIGHTS:
            _download(name_or_path, commit, cache_dir, [inside + pattern for pattern in patterns])
            if _weights_in(part):
                break
    if not (files := _weights_in(part)):
        wanted = f"a folder or repository with {_WEIGHTS[0][0]} or {_WEIGHTS[1][0]}, whole or in parts"
        raise must_be(OPTION, name_or_path, wanted, "there are no weights beside the config.json")
    if commit is None:
        _refuse_damaged(part.resolve())
    config = _read(part / "config.json", name_or_path)
    if config.keys() >= _STATE_OF_EMA:
        config = {key: value for key, value in config.items() if key not in _STATE_OF_EMA}
    return StartWeights(name_or_path, commit, _sum_of(files), config, str(part))


def _download(repo_id: str, revision: str | None, cache_dir: str | None, patterns: Any) -> Path:
    """The folder of a repository's files with these patterns, from the cache if the Hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(repo_id, revision=revision, cache_dir=cache_dir, allow_patterns=[*patterns]))
    except (HTTPError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "a folder, or a Hub id (USER/NAME)" + (f", with the revision {revision!r}" if revision else "")
        raise must_be(OPTION, repo_id, wanted, f"no such folder exists, and the Hub says: {reason}") from None


def _part(top: Path, name: str, class_name: str, component: str) -> Path:
    """The folder of the model: the one given, or that of the pipeline's part."""
    if (top / _LORA_FILE).is_file():
        hint = "start from the folder of the model inside it, or merge the LoRA with diffusers' fuse_lora"
        raise must_be(OPTION, name, "a pipeline or a model without a LoRA beside it", hint, got=f"one with {_LORA_FILE}")
    if (top / "model_index.json").is_file():
        index = _read(top / "model_index.json", name)
        classes = {key: value[1] for key, value in index.items() if isinstance(value, list) and len(value) == 2}
        models = {key: each for key, each in classes.items() if is_plain_name(key) and (top / key / "config.json").is_file()}
        found = sorted((key for key, each in models.items() if each == class_name), key=lambda key: key != component)
        if found:
            return top / found[0]
        if not (top / "config.json").is_file():  # pipelines of old have it beside their index
            has = ", ".join(f"{key} ({each})" for key, each in models.items()) or "no models"
            raise must_be(OPTION, name, f"a pipeline with a {class_name}", _remedy(class_name), got=f"one with {has}")
    if not (top / "config.json").is_file():
        wanted = "the folder of a pipeline (model_index.json) or of a model (config.json)"
        raise must_be(OPTION, name, wanted, "give the folder that save_pretrained wrote", got="neither")
    found_class = _read(top / "config.json", name).get("_class_name", class_name)
    if found_class != class_name:
        raise must_be(OPTION, name, f"weights of a {class_name}", _remedy(class_name), got=f"those of a {found_class}")
    return top


def _refuse_damaged(part: Path) -> None:
    """Raises a `LabError` if a model is that of a run, or of one of its checkpoints, and is damaged."""
    for folder, read in ((part, ""), (part.parent, (f"{part.name}/", "model_index.json", _RECORDS[0]))):
        if any((folder / name).is_file() for name in _RECORDS):
            refuse_damaged(folder, only=lambda name: name.startswith(read))  # noqa: B023  # called at once


def _remedy(class_name: str) -> str:
    return f"these data need a {class_name}; --denoiser NAME trains another class, which --import may register"


def _read(file: Path, name: str) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is not a mapping")
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"{OPTION} {name!r}: {file.name} cannot be read: {error}. Hint: restore it.") from None
    return data


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights, those in safetensors if there are any."""
    found: list[Path] = []
    for whole, parts, _ in _WEIGHTS:
        found = found or sorted(folder.glob(whole)) or sorted(folder.glob(parts))
    return found


def _sum_of(files: list[Path]) -> str:
    sums = [file_sums(file)["sha256"] for file in files]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


# --- configurations alone -----------------------------------------------------------------------------------------------


def load_model_config(model_class: Any, name_or_path: str, cache_dir: str | None) -> dict[str, Any]:
    """The configuration of a model of this class, with the defaults filled in."""
    path, option = expanded(name_or_path), "--model_config_name_or_path"
    text = read_utf8(path, option) if path.is_file() else None
    try:
        config = model_class.load_config(name_or_path, cache_dir=cache_dir) if text is None else json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        wanted = "a folder with a config.json, a config.json file, or a Hub id (USER/NAME)"
        raise must_be(option, name_or_path, wanted, f"it cannot be read: {error}") from None
    return complete_config(model_class, config, option, name_or_path)


def complete_config(model_class: Any, config: dict[str, Any], option: str, name_or_path: str) -> dict[str, Any]:
    """A configuration that was read, with the defaults filled in; a `LabError` if no such model can be built from it."""
    import torch

    wanted = model_class.__name__
    found = config.get("_class_name", wanted)
    if found != wanted:
        raise LabError(f"{name_or_path!r} is the configuration of a {found}; on these data this script trains a {wanted}.")
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    parameters = inspect.signature(model_class.__init__).parameters
    if unknown := [key for key in given if key not in parameters]:
        raise LabError(f"{wanted} does not take {', '.join(map(repr, unknown))} in its configuration. Remove it.")
    defaults = {name: known.default for name, known in parameters.items() if known.default is not known.empty}
    try:
        with torch.device("meta"):
            model_class(**defaults | given)
    except Exception as error:  # of any type, as diffusers and torch check little
        told = f"{option} {name_or_path!r}: no {wanted} can be built from it: {error} Correct its config.json."
        raise LabError(told) from error
    return defaults | given
