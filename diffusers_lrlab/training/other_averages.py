"""Pipelines of the averages beside the first one of `--ema`, in the folder of a run."""

from pathlib import Path

import torch

from ..averaging.averages import EMA
from ..core.files import atomic_folder
from .lora import base_weights, trained_parameters
from .run_folder import RunFolder
from .run_state import RunState
from .saved_pipeline import SavedPipeline, Weights
from .sharding import whole_values

OTHERS = "averages"  # in `lrlab/`


def save_other_averages(run: RunState, folder: RunFolder) -> list[Path]:
    """
    Pipelines with the averages beside the first one, except those of which there are snapshots; all processes call this.
    """
    forms = run.config.given_ema_forms
    saved, first = [], len(forms[0].tracks)
    for number, form in enumerate(forms[1:], 2):
        average, first = run.averages[first], first + len(form.tracks)
        values = [] if form.is_posthoc else whole_values(run, average, folder.is_writer)
        if values and folder.is_writer:
            saved.append(folder.lab / OTHERS / str(number))
            about = {"kind": form.name, "form": str(form), "update": run.update}
            pipeline = SavedPipeline.of(folder.path)
            with atomic_folder(saved[-1]) as temporary:
                pipeline.write(temporary, _named_weights(run, average, values, pipeline), about)
    return saved


def _named_weights(run: RunState, average: EMA, values: list[torch.Tensor], pipeline: SavedPipeline) -> Weights:
    """The weights of an average by their names in the pipeline's files; of a merged LoRA, those of the whole model."""
    if run.config.merge_lora:
        with average.swapped_in():
            return {name: value.cpu() for name, value in base_weights(run.model, merged=True).items()}
    weights = zip(trained_parameters(run.model), values, strict=True)
    return {pipeline.saved_name(name): value.cpu() for name, value in weights}
