"""Samples during training, and the saved pipeline."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..core.errors import warn
from ..core.files import atomic_file, full_disk_explained, sync, sync_tree, temporary_beside
from ..core.streams import stream_generator
from ..models.registry import denoiser_code
from .run_state import RunState


def draw_samples(run: RunState, num: int, purpose: str = "samples", show_progress: bool = False) -> np.ndarray:
    """
    Samples of the model as it is, see [`DataKind.sample`]; always from the same starting noise, whose stream is named after
    the purpose.
    """
    kind, config, model = run.kind, run.config, run.model
    was_training = model.training
    model.eval()
    pipeline = sampling_pipeline(run)
    # Over the passes if there are several, else over the steps of the one.
    several = num > kind.sampling_batch
    pipeline.set_progress_bar_config(disable=True if several or not show_progress else None, desc=purpose)
    parts = []
    for start in tqdm(range(0, num, kind.sampling_batch), desc=purpose, disable=not (show_progress and several)):
        generator = stream_generator(config.seed, purpose, start, device=model.device)
        size = min(kind.sampling_batch, num - start)
        parts.append(kind.sample(pipeline, size, generator, config.num_inference_steps))
    model.train(was_training)
    return np.concatenate(parts)


def sampling_pipeline(run: RunState) -> Any:
    """A pipeline around the model as it is, with a scheduler of its own."""
    return run.kind.make_pipeline(run.model, run.process.sampling_scheduler())


def save_preview(folder: Path, update: int, samples: np.ndarray) -> None:
    """Keeps samples of one moment as an array, from which the plots are drawn."""
    with atomic_file(folder / f"update-{update:08d}.npy") as path:
        np.save(path, samples)


def load_previews(folder: Path) -> dict[int, np.ndarray]:
    """Update -> samples, in order; those of damaged files, which only pictures are made of, are left out with a warning."""
    previews = {}
    for path in sorted(folder.glob("update-*.npy")):
        try:
            previews[int(path.stem.split("-")[1])] = np.load(path)
        except (ValueError, EOFError, OSError):  # how numpy meets them
            warn(f"{str(path)!r} is damaged, and no picture is made of it.")
    return previews


def save_pipeline(run: RunState, folder: Path) -> None:
    """
    Writes the pipeline into the folder of a run, whole or not at all: it can be loaded while there is an index, which is
    removed before anything is replaced, and written last.
    """
    temporary, index = temporary_beside(folder / "pipeline"), folder / "model_index.json"
    try:
        with full_disk_explained(index):
            run.kind.make_pipeline(run.model, run.process.scheduler).save_pretrained(temporary)
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
