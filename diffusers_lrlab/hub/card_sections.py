"""The parts of a model card that depend on the kind of data."""

from dataclasses import dataclass, replace
from typing import Any

from ..training.kinds.base import DataKind, row_for


@dataclass(frozen=True)
class CardSection:
    """The text of a card on a kind of data. A kind of another package puts its own under its name into [`CARD_SECTIONS`]."""

    task: str = "other"  # the Hub's name for what the model does; "other" declares none
    tags: tuple[str, ...] = ()  # beside those of all cards
    # Markdown that loads the pipeline and samples, with `{location}`, `{inference_steps}` and `{guidance_scale}`.
    example: str = """```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
```
"""
    # Markdown with `{location}`, for the default model in a pipeline of this package: how both load without the package.
    without_package: str = ""
    plots: str = ""  # Markdown of plots that only this kind has


_WITHOUT_PACKAGE = """
Without diffusers_lrlab, with the code that is stored beside the weights; read it first:

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(
    "{location}", custom_pipeline="{location}", trust_remote_code=True
)
```
"""


def _example(call: str, made: str = "images", pipeline: str = "DiffusionPipeline", own: bool = True) -> str:
    """Markdown that loads a pipeline, which needs this package if it is its `own`, and calls it."""
    imports = "import diffusers_lrlab\n" * own
    return f"""```python
{imports}from diffusers import {pipeline}

pipeline = {pipeline}.from_pretrained("{{location}}")
{made} = pipeline({call}).{made}
```
"""


_STEPS, _UNCONDITIONAL = "num_inference_steps={inference_steps}", "unconditional-image-generation"
CARD_SECTIONS: dict[str, CardSection] = {
    "images": CardSection(
        _UNCONDITIONAL, (_UNCONDITIONAL,), _example(f"batch_size=16, {_STEPS}", pipeline="DDPMPipeline", own=False)
    ),
    "latents": CardSection(
        _UNCONDITIONAL, (_UNCONDITIONAL, "latent-diffusion"), _example(f"batch_size=16, {_STEPS}"), _WITHOUT_PACKAGE
    ),
    "points": CardSection(
        tags=("points",),
        example=_example(f"num_points=10_000, {_STEPS}", "points"),
        without_package=_WITHOUT_PACKAGE,
        plots="""
![From noise to data](lrlab/trajectory.png)
""",
    ),
}

_LABELLED_IMAGES = CardSection(
    tags=("class-conditional-image-generation",),
    example=_example(f"class_labels={{labels}}, {_STEPS}"),
    without_package=_WITHOUT_PACKAGE,
)
LABELLED_SECTIONS: dict[str, CardSection] = {
    "images": _LABELLED_IMAGES,
    "latents": replace(_LABELLED_IMAGES, tags=(*_LABELLED_IMAGES.tags, "latent-diffusion")),
}
"""Of runs with class labels; the example has `{labels}`, some names of classes."""

_DIT_EXAMPLE = _example(f"[0, 1], guidance_scale={{guidance_scale}}, {_STEPS}", pipeline="DiTPipeline", own=False).replace(
    "images =", "print(pipeline.labels)  # by name\nimages ="
)


def section_of(kind: DataKind, config: dict[str, Any], pipeline: str = "") -> CardSection:
    """The parts of the card of a run, by its recorded configuration and the class of its pipeline."""
    rows = CARD_SECTIONS if config["label_column"] is None else LABELLED_SECTIONS
    section = row_for(kind, rows, CardSection())
    if pipeline == "DiTPipeline":
        return replace(section, example=_DIT_EXAMPLE, without_package="")
    if pipeline == "DiTImagePipeline" and config["label_column"] is None:  # is called as the pipeline of latents is
        called_alike = CARD_SECTIONS["latents"]
        return replace(section, example=called_alike.example, without_package=called_alike.without_package)
    return section
