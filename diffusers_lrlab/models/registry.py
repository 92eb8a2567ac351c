"""Registry of denoisers, which replace the default model of a kind of data, and the conventions of their classes."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LabError, must_be
from ..core.plugins import Unusable
from ..core.registry import Parameter, Registry
from ..core.values import checked

_PACKAGE = "diffusers_lrlab"


class Architecture:
    """The conventions of a model class. These are the conventions of UNets, MLPs and third-party classes."""

    component: str | None = None  # its name in pipelines; `None` for that of the kind of data
    pipeline: str | None = None  # "module:class" of this package's pipeline of it; `None` for that of the kind of data
    # The label that stands for "no label", and so the most classes; `None` for the label after the last class.
    null_label: int | None = None

    def of_data(self, of_data: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that the data decide, by the names that the class gives them."""
        return dict(of_data)

    def sizes(self, given: Mapping[str, Any], of_data: Mapping[str, Any], num_images: int | None) -> dict[str, Any]:
        """
        Arguments of the class from the parameters of its row, for data with these arguments and this number of training
        images, `None` for a stream. Raises a `LabError` for parameters that exclude each other or do not fit the data.
        """
        return dict(given)

    def check_start(self, arguments: Mapping[str, Any], model: str) -> None:
        """Raises a `LabError` if weights to start from are those of a model that cannot be trained."""

    def prepared(self, model: Any) -> Any:
        """A new model, ready to be trained."""
        return model


def _check_separate(model: Any, *_: Any) -> Any:
    """A model whose weights share no memory, as files of safetensors require."""
    weights = model.state_dict() if hasattr(model, "state_dict") else {}
    names: dict[int, list[str]] = {}  # of the weights in a storage
    for name, value in weights.items():
        names.setdefault(value.untyped_storage()._cdata, []).append(name)
    for shared in names.values():
        if sum(weights[name].nbytes for name in shared) > weights[shared[0]].untyped_storage().nbytes():
            told = f"its {' and '.join(sorted(shared)[:2])} share their memory"
            hint = "Hint: keep one tensor, and use it wherever forward() needs it"
            raise Unusable(f"must return a model that can be saved: {told}. {hint}")
    return model


DENOISERS = Registry("denoiser", returns=_check_separate)
"""
Entries are classes, or their import paths, "module:class". The fact `architecture` of an entry is the path of a subclass of
[`Architecture`].
"""

DENOISERS.register(
    "mlp",
    description="residual MLP on sinusoidal embeddings, for points: MLPDenoiser",
    source="AI-Scientist's 2d_diffusion template",
    parameters=(
        Parameter("hidden_size", int, 256, "width of the residual blocks", "[1, inf)"),
        Parameter("num_layers", int, 3, "number of residual blocks", "[0, inf)"),
        Parameter("embedding_size", int, 128, "size of the embedding of a coordinate or the timestep; even", "[4, inf)"),
        Parameter("coordinate_scale", float, 25.0, "factor on coordinates before they are embedded", "(0, inf)"),
    ),
)("diffusers_lrlab.models.mlp_denoiser:MLPDenoiser")
DENOISERS.register(
    "dit",
    description="transformer on patches of images or latents, with or without class labels: DiTTransformer2DModel",
    source="DiT, arXiv 2212.09748",
    parameters=tuple(
        Parameter(name, int, None, description, interval)
        for name, description, interval in (
            ("hidden_size", "size of the embedding of a patch; derived from the number of images: 64 to 384", "[4, 1e5]"),
            ("num_layers", "transformer blocks; derived from the number of images: 4 to 12", "[1, 1e4]"),
            ("num_heads", "attention heads; derived: heads of size 32", "[1, 1e4]"),
            (
                "patch_size",
                "side of a patch; derived: 2, or the nearest that makes 4 to 16 patches along a side",
                "[1, 1e4]",
            ),
        )
    ),
    facts={"architecture": "diffusers_lrlab.models.networks:DiT"},
)("diffusers:DiTTransformer2DModel")


@checked
def register_denoiser(
    name: str, *, description: str, source: str, parameters: tuple[Parameter, ...] = ()
) -> Callable[[Any], Any]:
    """
    A decorator that registers a class as a denoiser under a name, for `--denoiser`.

    The class has diffusers' `ModelMixin` and `ConfigMixin`, and is called as `model(noisy, timesteps).sample`. Its
    `__init__` takes what the data decide (`dimension` for points; `sample_size` and `in_channels`, and `out_channels` if it
    has such, for images; `num_class_embeds` with labels, which `forward` gets as `class_labels`) and the `parameters`. The
    code of your own class is saved beside the weights: it must be one file that needs no other file of yours. A class of
    diffusers stays as it is: `register_denoiser("unet", ...)(UNet2DModel)`.

    Args:
        name (`str`): What `--denoiser` takes.
        description (`str`): A line for tables.
        source (`str`): The paper, or where it comes from.
        parameters (`tuple` of `Parameter`, *optional*): Arguments that may be given with the name.
    """

    def decorator(model_class: Any) -> Any:
        _check_class(name, model_class, [parameter.name for parameter in parameters])
        DENOISERS.register(name, description=description, source=source, parameters=parameters)(model_class)
        if not _is_of_diffusers(model_class):
            # Saved pipelines name classes by their module, and look for them there.
            model_class.__module__ = _PACKAGE
            setattr(sys.modules[_PACKAGE], model_class.__name__, model_class)
        return model_class

    return decorator


def _check_class(name: str, model_class: Any, parameters: list[str]) -> None:
    """Raises a `LabError` for a class that could not be trained, or not be loaded again."""
    from diffusers.configuration_utils import ConfigMixin
    from diffusers.models.modeling_utils import ModelMixin

    of = f"denoiser {name!r}"
    is_model = inspect.isclass(model_class) and issubclass(model_class, ModelMixin) and issubclass(model_class, ConfigMixin)
    if not is_model:
        wanted = "a class of diffusers' ModelMixin and ConfigMixin"
        raise must_be(of, model_class, wanted, "derive it from both, which save and load it")
    if unknown := [parameter for parameter in parameters if parameter not in inspect.signature(model_class).parameters]:
        raise LabError(f"The {of} declares {unknown[0]!r}, which {model_class.__name__}.__init__ does not take.")
    if _is_of_diffusers(model_class):  # its code is not saved
        return
    if model_class.__name__ in dir(sys.modules[_PACKAGE]):
        raise LabError(f"The {of} cannot be a class {model_class.__name__}: that name is taken. Choose another name.")
    file = inspect.getfile(inspect.unwrap(model_class.forward))
    if not Path(file).is_file():
        told = f"The {of} is not in a file ({file}), so its code cannot be saved beside its weights."
        raise LabError(f"{told} Put it into one, and import that.")


def _is_of_diffusers(model_class: Any) -> bool:
    return model_class.__module__.partition(".")[0] == "diffusers"


def denoiser_class(name: str) -> Any:
    return DENOISERS[name].function


def architecture_of(name: str | None) -> Architecture:
    """The conventions of a denoiser's class; `None` is the default model of a kind of data."""
    path = DENOISERS[name].facts.get("architecture") if name is not None and name in DENOISERS else None
    return Architecture() if path is None else pkgutil.resolve_name(path)()


def architectures() -> list[Architecture]:
    return [architecture_of(name) for name in DENOISERS]


def has_own_code(name: str) -> bool:
    """Whether the code of a denoiser is saved beside its weights, as code of neither diffusers nor this package."""
    return DENOISERS[name].is_foreign and not _is_of_diffusers(denoiser_class(name))


def denoiser_code(model: Any) -> Path | None:
    """The file of code to save beside the weights of a model; `None` for a class of diffusers."""
    if type(model).__module__ != _PACKAGE:
        return None
    return Path(inspect.getfile(inspect.unwrap(type(model).forward)))


def denoiser_arguments(
    name: str, kwargs: Mapping[str, Any], of_data: Mapping[str, Any], data: str, num_images: int | None = None
) -> dict[str, Any]:
    """All arguments of a denoiser: those decided by the data, and those given."""
    import torch

    model_class, architecture = denoiser_class(name), architecture_of(name)
    of_data = architecture.of_data(of_data)
    takes = inspect.signature(model_class).parameters
    needed = [key for key in of_data if key != "out_channels"]
    if missing := [key for key in needed if key not in takes]:
        raise LabError(
            f"--denoiser {name} does not suit {data}: {model_class.__name__} takes no {missing[0]}. Choose other data, or a "
            f"denoiser that takes {' and '.join(needed)}."
        )
    sizes = architecture.sizes(kwargs, of_data, num_images)
    arguments = {key: value for key, value in of_data.items() if key in takes} | sizes
    try:
        with torch.device("meta"):
            DENOISERS[name](**arguments)
    except LabError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise LabError(f"--denoiser {name} cannot be built as {model_class.__name__}({given}). {error}") from error
    return arguments
