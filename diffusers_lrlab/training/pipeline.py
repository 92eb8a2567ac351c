"""The pipeline of a run."""

import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import torch

from ..core.files import full_disk_explained, sync, sync_tree, temporary_beside
from ..models.registry import denoiser_code
from ..models.start_weights import LORA_FILE
from ..pipelines.reference import Reference, save_with_references
from .host_copies import with_weights
from .kinds.base import DataKind, row_for
from .lora import base_weights, has_lora, lora_weights
from .run_state import RunState

# Pipelines of runs with class labels, by the name of a kind.
LABELLED_PIPELINES = {
    "images": "diffusers_lrlab.pipelines.labelled_images:LabelledImagePipeline",
    "latents": "diffusers_lrlab.pipelines.latent_image:LatentImagePipeline",
}


def _pipeline_path(kind: DataKind, has_labels: bool) -> str:
    return row_for(kind, LABELLED_PIPELINES if has_labels else {}, kind.pipeline)


def pipeline_name(kind: DataKind, config: Any) -> str:
    """The class of the pipeline of a run, by its configuration or a recorded one."""
    column = config["label_column"] if isinstance(config, dict) else config.label_column
    return _pipeline_path(kind, column is not None).rpartition(":")[2]


def _parts_of(run: RunState) -> dict[str, Any]:
    """Parts of the pipeline beside model and scheduler."""
    parts, classes = run.kind.pipeline_parts(run.config), run.plan.classes
    if classes is None:
        return parts
    return parts | {"id2label": dict(enumerate(classes.names)), "guidance_scale": run.config.guidance_scale}


def make_pipeline(run: RunState, scheduler: Any = None, model: Any = None) -> Any:
    """A pipeline with the current model, or with `model`, by default with a new sampling scheduler."""
    kind, config, model = run.kind, run.config, run.model if model is None else model
    parts = _parts_of(run)
    loaded = {name: part.load(config.cache_dir) if isinstance(part, Reference) else part for name, part in parts.items()}
    loaded = {name: part.to(model.device) if isinstance(part, torch.nn.Module) else part for name, part in loaded.items()}
    known = {kind.component: model, "scheduler": run.process.sampling_scheduler() if scheduler is None else scheduler}
    path = _pipeline_path(kind, run.plan.classes is not None)
    pipeline = pkgutil.resolve_name(path)(**known, **loaded)
    if plain := {name: part for name, part in parts.items() if isinstance(part, dict | list | str | int | float)}:
        pipeline.register_to_config(**plain)  # else the saved index would lack them
    return pipeline


def save_pipeline(run: RunState, folder: Path) -> None:
    """
    Writes the pipeline into the folder of a run, whole or not at all: it can be loaded only while there is an index, which
    is removed first and written last.
    """
    temporary, index = temporary_beside(folder / "pipeline"), folder / "model_index.json"
    parts = _parts_of(run)
    references = {name: part for name, part in parts.items() if isinstance(part, Reference)}
    try:
        with full_disk_explained(index):
            model = run.model
            if has_lora(model):
                model = with_weights(model, base_weights(model, run.config.merge_lora))
                if not run.config.merge_lora:
                    lora_weights(run.model, run.kind.component).save_pretrained(temporary)
            save_with_references(make_pipeline(run, run.process.scheduler, model), references, temporary)
            if (code := denoiser_code(run.model)) is not None:
                shutil.copyfile(code, temporary / run.kind.component / f"{type(run.model).__module__}.py")
        sync_tree(temporary)
        index.unlink(missing_ok=True)
        if run.config.merge_lora:
            (folder / LORA_FILE).unlink(missing_ok=True)
        sync(folder)
        for part in (*(path for path in temporary.iterdir() if path.name != index.name), temporary / index.name):
            if part.is_dir() and (folder / part.name).exists():
                os.replace(folder / part.name, temporary / f"old-{part.name}")
            sync(folder)
            os.replace(part, folder / part.name)
        sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
