"""The parts of a model card that depend on the kind of data."""

from dataclasses import dataclass

from ..training.kinds.base import DataKind, row_for


@dataclass(frozen=True)
class CardSection:
    """
    What a card says of a kind of data. A kind of another package puts its own under its name into [`CARD_SECTIONS`].

    Args:
        task (`str`): The Hub's name for what the model does; "other" declares none.
        tags (`tuple` of `str`): Tags beside those of all cards.
        example (`str`): Markdown that loads the pipeline and samples, with `{location}` and `{inference_steps}`.
        without_package (`str`): Markdown with `{location}`, added for the default model where its pipeline is of this
            package: how both load without it.
        plots (`str`): Markdown of plots that only this kind has.
    """

    task: str = "other"
    tags: tuple[str, ...] = ()
    example: str = """```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
```
"""
    without_package: str = ""
    plots: str = ""


_BY_OWN_CODE = """
Without diffusers_lrlab, by the code that lies beside the weights; read it first:

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(
    "{location}", custom_pipeline="{location}", trust_remote_code=True
)
```
"""

CARD_SECTIONS: dict[str, CardSection] = {
    "images": CardSection(
        task="unconditional-image-generation",
        tags=("unconditional-image-generation",),
        example="""```python
from diffusers import DDPMPipeline

pipeline = DDPMPipeline.from_pretrained("{location}")
images = pipeline(batch_size=16, num_inference_steps={inference_steps}).images
```
""",
    ),
    "latents": CardSection(
        task="unconditional-image-generation",
        tags=("unconditional-image-generation", "latent-diffusion"),
        example="""```python
import diffusers_lrlab
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
images = pipeline(batch_size=16, num_inference_steps={inference_steps}).images
```
""",
        without_package=_BY_OWN_CODE,
    ),
    "points": CardSection(
        tags=("points",),
        example="""```python
import diffusers_lrlab
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
points = pipeline(num_points=10_000, num_inference_steps={inference_steps}).points
```
""",
        without_package=_BY_OWN_CODE,
        plots="""
![From noise to data](lrlab/trajectory.png)

![Points on their way from noise to data](lrlab/sampling.gif)
""",
    ),
}


def section_of(kind: DataKind) -> CardSection:
    return row_for(kind, CARD_SECTIONS, CardSection())
