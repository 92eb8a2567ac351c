"""Makes our models and pipelines loadable by diffusers' own `from_pretrained`, from folders and from the Hub.

Otherwise diffusers refuses a repository with unknown classes, or runs the code beside the weights if it is trusted. After
registration that code is neither needed nor run.
"""

import importlib
import sys
from typing import Any

PACKAGE = "diffusers_lrlab"
PIPELINES = {
    f"{PACKAGE}.pipelines.point_ddpm": ("PointDDPMPipeline",),
    f"{PACKAGE}.pipelines.image": ("ImagePipeline", "LabelledImagePipeline", "LatentImagePipeline", "DiTImagePipeline"),
}
"""The classes by their modules; after each the names that it has in pipelines of version 0.1.0."""


def register_pipelines(_: Any) -> None:
    """Registers with `diffusers.pipelines`, whose `pipeline_utils` is imported by now. Idempotent."""
    from diffusers import pipelines
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    # Components are saved as [package, class], not by their full module.
    LOADABLE_CLASSES.setdefault(PACKAGE, {"ModelMixin": ["save_pretrained", "from_pretrained"]})
    # diffusers searches here before it looks at code in the repository.
    setattr(pipelines, PACKAGE, sys.modules[PACKAGE])
    # While that module is being imported, it is already in sys.modules but incomplete.
    for name in PIPELINES:
        importlib.import_module(name)


def register_pipeline(module: Any) -> None:
    """Adds the class where `DiffusionPipeline.from_pretrained` looks up the name in a model_index.json."""
    import diffusers

    names = PIPELINES[module.__name__]
    for name in names:
        setattr(diffusers, name, getattr(module, names[0]))
