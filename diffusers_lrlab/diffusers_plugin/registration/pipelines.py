"""Makes our models and pipelines load by diffusers' own `from_pretrained`, from folders and from the Hub.

Without this, diffusers refuses a repository that names classes it does not know, or runs the code beside the weights if
that is trusted. With it, that code is neither needed nor run.
"""

import importlib
import sys
from typing import Any

PACKAGE = "diffusers_lrlab"
POINT_PIPELINE = f"{PACKAGE}.pipelines.point_ddpm"


def register_pipelines(_: Any) -> None:
    """Registers with `diffusers.pipelines`, whose `pipeline_utils` is imported by now. Idempotent."""
    from diffusers import pipelines
    from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES

    # Components are saved as [package, class] and not by their full module.
    LOADABLE_CLASSES.setdefault(PACKAGE, {"ModelMixin": ["save_pretrained", "from_pretrained"]})
    # Here components are looked for before any code in the repository is.
    setattr(pipelines, PACKAGE, sys.modules[PACKAGE])
    # Inside the import of that module, it is in sys.modules already, though not ready.
    importlib.import_module(POINT_PIPELINE)


def register_point_pipeline(module: Any) -> None:
    """Puts the class where `DiffusionPipeline.from_pretrained` looks for the one that a model_index.json names."""
    import diffusers

    diffusers.PointDDPMPipeline = module.PointDDPMPipeline
