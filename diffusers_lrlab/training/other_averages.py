"""Pipelines of the averages beside the first one of `--ema`, in the folder of a run."""

from pathlib import Path

from ..core.files import atomic_folder
from .run_folder import RunFolder
from .run_state import RunState
from .saved_pipeline import SavedPipeline

OTHERS = "averages"  # in `lrlab/`


def save_other_averages(run: RunState, folder: RunFolder) -> list[Path]:
    """
    Pipelines with the averages beside the first one, except those of which there are snapshots.
    """
    forms = run.config.given_ema_forms
    saved, first = [], len(forms[0].tracks)
    for number, form in enumerate(forms[1:], 2):
        average, first = run.averages[first], first + len(form.tracks)
        if folder.is_writer and not form.is_posthoc:
            saved.append(folder.lab / OTHERS / str(number))
            about = {"kind": form.name, "form": str(form), "update": run.update}
            named = zip(run.model.named_parameters(), average.shadow_params, strict=True)
            weights = {name: value.cpu() for (name, _), value in named}
            with atomic_folder(saved[-1]) as temporary:
                SavedPipeline.of(folder.path).write(temporary, weights, about)
    return saved
