"""The pipeline of a run: made, sampled and saved."""

import json
import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.errors import warn
from ..core.files import atomic_file, full_disk_explained, sync, sync_tree, temporary_beside
from ..core.streams import stream_generator
from ..data.labels import KEYWORD
from ..models.registry import architecture_of, denoiser_code
from .kinds import DataKind
from .run_state import RunState

SHOWN = "samples"  # random stream of the samples to look at


def _pipeline_path(kind: DataKind, has_labels: bool, denoiser: str | None) -> str:
    return architecture_of(denoiser).pipeline or (has_labels and kind.labelled_pipeline) or kind.pipeline


def pipeline_name(kind: DataKind, config: Any, folder: Path) -> str:
    """
    The class of the pipeline of a run: of the one in its folder, or, if there is none, by its configuration or a recorded
    one.
    """
    if (index := folder / "model_index.json").is_file():
        return json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    known = config if isinstance(config, dict) else vars(config)
    return _pipeline_path(kind, known["label_column"] is not None, known.get("denoiser")).rpartition(":")[2]


def make_pipeline(run: RunState, scheduler: Any = None, is_saved: bool = False) -> Any:
    """
    A pipeline with the current model, by default with a new sampling scheduler. One to save has no part whose source it
    knows, such as a `vae` beside a `vae_source`.
    """
    config, classes = run.config, run.plan.classes
    path, parts = _pipeline_path(run.kind, classes is not None, config.denoiser), run.kind.pipeline_parts(config)
    if classes is not None:
        parts = parts | {"id2label": dict(enumerate(classes.names)), "guidance_scale": config.guidance_scale}
        if architecture_of(config.denoiser).null_label is not None:  # else its table of labels says so
            parts["has_null_label"] = classes.null_label is not None
    loaded = {name: part.to(run.model.device) if isinstance(part, torch.nn.Module) else part for name, part in parts.items()}
    if is_saved:
        loaded = {name: part for name, part in loaded.items() if f"{name}_source" not in parts}
    known = {run.component: run.model, "scheduler": run.process.sampling_scheduler() if scheduler is None else scheduler}
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
    try:
        with full_disk_explained(index):
            make_pipeline(run, run.process.scheduler, is_saved=True).save_pretrained(temporary)
            if (code := denoiser_code(run.model)) is not None:
                shutil.copyfile(code, temporary / run.component / f"{type(run.model).__module__}.py")
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


def sample_conditions(run: RunState, num: int, is_shown: bool = False) -> dict[str, torch.Tensor]:
    """
    Labels of samples by the model's keyword, if the data have any. Samples to measure have the proportions of the data;
    samples to show go through the classes in order, at most `num` of them.
    """
    classes = run.plan.classes
    return {} if classes is None else {KEYWORD: classes.to_show(num) if is_shown else classes.to_measure(num)}


def draw_samples(run: RunState, num: int, purpose: str = SHOWN, show_progress: bool = False) -> np.ndarray:
    """Samples of the current model, see [`DataKind.sample`], from the random stream named `purpose`."""
    kind, config, model = run.kind, run.config, run.model
    conditions = sample_conditions(run, num, is_shown=purpose == SHOWN)
    num = len(next(iter(conditions.values()), range(num)))
    was_training = model.training
    model.eval()
    pipeline = make_pipeline(run)
    # Progress over the passes, or over the steps of a single pass.
    several = num > kind.sampling_batch
    pipeline.set_progress_bar_config(disable=True if several or not show_progress else None, desc=purpose)
    parts = []
    for start in tqdm(range(0, num, kind.sampling_batch), desc=purpose, disable=not (show_progress and several)):
        generator = stream_generator(config.seed, purpose, start, device=model.device)
        size = min(kind.sampling_batch, num - start)
        own = {keyword: values[start : start + size] for keyword, values in conditions.items()}
        parts.append(kind.sample(pipeline, size, generator, config.num_inference_steps, **own))
    model.train(was_training)
    return np.concatenate(parts)


def save_preview(folder: Path, update: int, samples: np.ndarray) -> None:
    """Saves samples of an update for plots."""
    with atomic_file(folder / f"update-{update:08d}.npy") as path:
        np.save(path, samples)


def load_previews(folder: Path) -> dict[int, np.ndarray]:
    """Samples by update, in order; damaged files are skipped with a warning."""
    previews = {}
    for path in sorted(folder.glob("update-*.npy")):
        try:
            previews[int(path.stem.removeprefix("update-"))] = np.load(path)
        except (ValueError, EOFError, OSError):  # of numpy for a damaged file
            warn(f"{str(path)!r} is damaged and not plotted.")
    return previews
