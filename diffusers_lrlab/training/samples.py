"""Samples of the current model, and previews saved during training."""

from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.errors import warn
from ..core.files import atomic_file
from ..core.streams import stream_generator
from ..data.labels import KEYWORD
from .pipeline import make_pipeline
from .run_state import RunState

SHOWN = "samples"  # random stream of the samples to look at


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
            previews[int(path.stem.split("-")[1])] = np.load(path)
        except (ValueError, EOFError, OSError):  # of numpy for a damaged file
            warn(f"{str(path)!r} is damaged and not plotted.")
    return previews
