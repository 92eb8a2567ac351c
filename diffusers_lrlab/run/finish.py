"""The end of a run: the pipeline, final samples, distances, plots and card."""

import math
from typing import Any

import numpy as np
from PIL import Image

from ..core.errors import warn
from ..training.pipeline import pipeline_name
from ..training.results import results_of
from ..training.trackers import log_images
from ..training.trainer import Trainer
from .record import training_figures

_NOT_RESULTS = ("update", "images_seen", "loss_spike_bins")


def finish_run(trainer: Trainer, record: dict[str, Any]) -> None:
    """Saves all parts of a finished run, the weights first; adds the results to `record`."""
    trainer.save_result()
    if trainer.accelerator.is_main_process:
        _evaluate_and_draw(trainer, record)
    trainer.accelerator.wait_for_everyone()


def _evaluate_and_draw(trainer: Trainer, record: dict[str, Any]) -> None:
    """Writes final samples, their metrics, plots and card."""
    run, folder, accelerator = trainer.run, trainer.folder, trainer.accelerator
    config, shown_by = run.config, results_of(run.kind)
    rows = folder.read_metrics()
    results = {key: value for row in rows[-2:] for key, value in row.items() if key not in _NOT_RESULTS}
    record["train"]["results"] = results
    figures: dict[str, Any] = {}
    if config.evaluation:
        with run.averaged_weights():
            samples = shown_by.samples_to_show(run)
        figures = _finite(shown_by.evaluate(run, shown_by.samples_to_evaluate(run)))
        results.update(figures)
        trainer.log.keep_samples(samples)
    record["train"] |= training_figures(trainer)

    from ..diagnostics.plot import plot_timesteps
    from ..hub.card import write_model_card
    from ..training.plots import plot_losses, plot_lr

    plot_losses(rows, folder.lab / "loss.png")
    plot_lr(rows, run.plan, folder.lab / "lr.png")
    if config.evaluation:
        shown_by.draw(run, samples, folder.lab)
    if trainer.log.observer is not None:
        plot_timesteps(trainer.log.observer.log.table, folder.lab / "timesteps.png")
    _show_results(trainer, figures)
    write_model_card(folder.path, record)
    name = pipeline_name(run.kind, config, folder.path)
    accelerator.print(f"Finished: {name}.from_pretrained({str(folder.path)!r}). Card: {folder.path}/README.md")
    if config.posthoc is not None:
        accelerator.print(f"Averages of other widths: lrlab ema {folder.path} --sigma_rel 0.075")


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that a record in JSON can hold, with a warning for the others."""
    finite = {name: value for name, value in figures.items() if not isinstance(value, float) or math.isfinite(value)}
    for name in figures.keys() - finite.keys():
        warn(f"the metric {name!r} is {figures[name]}, and is left out of the record.")
    return finite


def _show_results(trainer: Trainer, figures: dict[str, Any]) -> None:
    """Sends metrics of the samples, and plots of losses, rates and noise levels, to the trackers."""
    trackers, update = trainer.accelerator.trackers, trainer.run.update
    if not trackers:
        return
    trainer.accelerator.log({f"results/{name}": value for name, value in figures.items()}, step=update)
    for name in ("loss", "lr", "timesteps"):
        if (file := trainer.folder.lab / f"{name}.png").exists():
            log_images(trackers, f"plots/{name}", np.asarray(Image.open(file).convert("RGB"))[None], update)
