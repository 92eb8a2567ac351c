"""The pipeline of a run: made around the model as it is, and saved."""

import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import torch

from ..core.files import full_disk_explained, sync, sync_tree, temporary_beside
from ..models.registry import denoiser_code
from ..pipelines.reference import Reference, save_with_references
from .kinds.base import DataKind
from .run_state import RunState


def pipeline_name(kind: DataKind) -> str:
    return kind.pipeline.rpartition(":")[2]


def make_pipeline(run: RunState, scheduler: Any = None) -> Any:
    """A pipeline around the model as it is, by default with a sampling scheduler of its own."""
    kind, config, model = run.kind, run.config, run.model
    parts = kind.pipeline_parts(config)
    loaded = {name: part.load(config.cache_dir) if isinstance(part, Reference) else part for name, part in parts.items()}
    loaded = {name: part.to(model.device) if isinstance(part, torch.nn.Module) else part for name, part in loaded.items()}
    known = {kind.component: model, "scheduler": run.process.sampling_scheduler() if scheduler is None else scheduler}
    pipeline = pkgutil.resolve_name(kind.pipeline)(**known, **loaded)
    if plain := {name: part for name, part in parts.items() if isinstance(part, dict | list | str | int | float)}:
        pipeline.register_to_config(**plain)  # else the saved index would lack them
    return pipeline


def save_pipeline(run: RunState, folder: Path) -> None:
    """
    Writes the pipeline into the folder of a run, whole or not at all: it can be loaded while there is an index, which is
    removed before anything is replaced, and written last.
    """
    temporary, index = temporary_beside(folder / "pipeline"), folder / "model_index.json"
    parts = run.kind.pipeline_parts(run.config)
    references = {name: part for name, part in parts.items() if isinstance(part, Reference)}
    try:
        with full_disk_explained(index):
            save_with_references(make_pipeline(run, run.process.scheduler), references, temporary)
            if (code := denoiser_code(run.model)) is not None:
                shutil.copyfile(code, temporary / run.kind.component / f"{type(run.model).__module__}.py")
        sync_tree(temporary)
        index.unlink(missing_ok=True)
        sync(folder)
        for part in (*(path for path in temporary.iterdir() if path.name != index.name), temporary / index.name):
            if part.is_dir() and (folder / part.name).exists():
                os.replace(folder / part.name, temporary / f"old-{part.name}")
            sync(folder)
            os.replace(part, folder / part.name)
        sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
