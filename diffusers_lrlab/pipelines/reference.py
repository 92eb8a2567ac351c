"""Parts of a pipeline that are not trained, such as a VAE: saved as the name of their source, not as a copy."""

import functools
import json
import pkgutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REFERENCES = "_references"  # in model_index.json, where diffusers ignores names that begin with an underscore
_INDEX = "model_index.json"


@dataclass(frozen=True)
class Reference:
    """
    A model that is loaded from elsewhere.

    Args:
        model (`str`): "module:class", such as "diffusers:AutoencoderKL".
        name_or_path (`str`): A Hub id or a folder, for `from_pretrained`.
        subfolder (`str`, *optional*): The folder of the weights in it.
        revision (`str`, *optional*): A branch, a tag or a commit of the Hub.
    """

    model: str
    name_or_path: str
    subfolder: str | None = None
    revision: str | None = None

    def load(self, cache_dir: str | None = None) -> Any:
        """The model, for inference; loaded once in a process."""
        return _load(self, cache_dir)

    @property
    def call(self) -> str:
        """Python code that loads it."""
        options = {name: value for name, value in asdict(self).items() if name not in ("model", "name_or_path") and value}
        arguments = [json.dumps(self.name_or_path), *(f"{name}={json.dumps(value)}" for name, value in options.items())]
        return f"{self.model.rpartition(':')[2]}.from_pretrained({', '.join(arguments)})"


@functools.lru_cache(maxsize=8)
def _load(reference: Reference, cache_dir: str | None) -> Any:
    where = asdict(reference) | {"pretrained_model_name_or_path": reference.name_or_path, "cache_dir": cache_dir}
    del where["model"], where["name_or_path"]
    model_class = pkgutil.resolve_name(reference.model)
    options = {name: value for name, value in where.items() if value is not None}
    return model_class.from_pretrained(**options).eval().requires_grad_(False)


def save_with_references(pipeline: Any, references: dict[str, Reference], folder: Path) -> None:
    """Saves a pipeline, which is not used afterwards, with the sources of these parts in place of their weights."""
    if not references:
        pipeline.save_pretrained(folder)
        return
    # A pipeline that can do without a part finds it by itself, so its index names no class to load.
    needed = [name for name in references if name not in type(pipeline)._optional_components]
    classes = {name: list(pipeline.config[name]) for name in needed}
    pipeline._optional_components = [*pipeline._optional_components, *references]  # else diffusers warns of their absence
    for name in references:
        setattr(pipeline, name, None)
    pipeline.save_pretrained(folder)
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    index |= {**classes, REFERENCES: {name: asdict(reference) for name, reference in references.items()}}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def saved_references(index: dict[str, Any]) -> dict[str, Reference]:
    """The parts that the index of a saved pipeline refers to."""
    found = index.get(REFERENCES, {})
    if not isinstance(found, dict) or not all(isinstance(fields, dict) for fields in found.values()):
        raise ValueError("the references of its parts are damaged")
    texts = [value for fields in found.values() for value in fields.values() if value is not None]
    try:
        if not all(isinstance(value, str) for value in texts):
            raise TypeError("they must be texts")
        return {name: Reference(**fields) for name, fields in found.items()}
    except TypeError as error:
        raise ValueError(f"the references of its parts are damaged: {error}") from None
