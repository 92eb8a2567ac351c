"""Configurations of models, from a folder, a file or the Hub."""

import inspect
import json
from typing import Any

from ..core.errors import LabError, must_be
from ..core.files import expanded, read_utf8


def load_model_config(model_class: Any, name_or_path: str, cache_dir: str | None) -> dict[str, Any]:
    """The configuration of a model of this class, with the defaults filled in."""
    config = read_model_config(model_class, name_or_path, cache_dir)
    return complete_config(model_class, config, "--model_config_name_or_path", name_or_path)


def read_model_config(model_class: Any, name_or_path: str, cache_dir: str | None) -> dict[str, Any]:
    """The configuration as it is, which may be that of another class; a `LabError` if it cannot be read."""
    path = expanded(name_or_path)
    is_path = path.suffix == ".json" or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if is_path and not path.exists():
        wanted = "a folder with a config.json, a config.json file, or a Hub id (USER/NAME)"
        raise must_be("--model_config_name_or_path", name_or_path, wanted, "no such file or folder exists")
    try:
        if path.is_file():
            config = json.loads(read_utf8(path, "--model_config_name_or_path"))
        else:
            config = model_class.load_config(name_or_path, cache_dir=cache_dir)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object.")
        return config
    except LabError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error)
        raise LabError(
            f"--model_config_name_or_path {name_or_path!r} cannot be read: {reason} Give a folder with a config.json, a "
            "config.json file, or a Hub id."
        ) from None


def complete_config(model_class: Any, config: dict[str, Any], option: str, name_or_path: str) -> dict[str, Any]:
    """A configuration that was read, with the defaults filled in; a `LabError` if no such model can be built from it."""
    wanted = model_class.__name__
    found = config.get("_class_name", wanted)
    if found != wanted:
        raise LabError(f"{name_or_path!r} is the configuration of a {found}; on these data this script trains a {wanted}.")
    given = {key: value for key, value in config.items() if not key.startswith("_")}
    parameters = inspect.signature(model_class.__init__).parameters
    if unknown := [key for key in given if key not in parameters]:
        raise LabError(f"{wanted} does not take {', '.join(map(repr, unknown))} in its configuration. Remove it.")
    defaults = {name: known.default for name, known in parameters.items() if known.default is not known.empty}
    _check_can_be_built(model_class, defaults | given, option, name_or_path)
    return defaults | given


def _check_can_be_built(model_class: Any, config: dict[str, Any], option: str, name_or_path: str) -> None:
    import torch

    try:
        with torch.device("meta"):
            model_class(**config)
    except Exception as error:  # of any type, as diffusers and torch check little
        raise LabError(
            f"{option} {name_or_path!r}: no {model_class.__name__} can be built from it: {error} Correct its config.json."
        ) from error
