"""The record of a run in `run.json`, and its end: pipeline, final samples, metrics, plots and card."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from ..core.environment import describe_environment, launch_command, peak_memory_mb
from ..core.errors import Interrupted, LabError, warn
from ..diagnostics.timestep_log import write_timesteps
from ..optimizers.timescales import half_life_of
from ..training.config import TrainingConfig, as_call
from ..training.pipeline import pipeline_name
from ..training.plan import Plan
from ..training.results import results_of
from ..training.trackers import log_images
from ..training.trainer import Trainer

_NOT_RESULTS = ("update", "images_seen", "loss_spike_bins")


def start_record(asked: TrainingConfig, plan: Plan, accelerator: Accelerator, previous: dict[str, Any]) -> dict[str, Any]:
    """The record of a run that begins, or that resumes the one with the record `previous`; warns of other plug-ins."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    before, command = previous.get("run", {}), launch_command()
    call = None if command or before else as_call(asked)
    meta = describe_environment()
    plugins = [{one["sha256"] for one in of.get("plugins", [])} for of in (previous.get("meta", {}), meta)]
    if previous and plugins[0] != plugins[1]:
        warn("the code that --import loads has changed since this run began.")
    return {
        "run": {
            "status": "running",
            "command": before.get("command", command or call),
            "call": before.get("call", call),  # of a Python program that started the run
            "started": before.get("started", now),
            "starts": [*before.get("starts", []), now],
            "seconds": before.get("seconds", 0.0),
            "ended": None,
            **({"parent": before["parent"]} if "parent" in before else {}),
        },
        "train": {
            "num_updates": plan.num_updates,
            "num_epochs": plan.num_epochs,
            "warmup_updates": plan.warmup_updates,
            "peak_learning_rate": plan.learning_rate,
            "global_batch": plan.layout.global_batch,
            "num_processes": accelerator.num_processes,
            "num_training_images": plan.num_images,
            "num_held_out_images": plan.num_held_out,
            "data_shape": plan.data_shape,
            **({} if plan.classes is None else {"class_names": list(plan.classes.names)}),
            **({} if plan.autoencoder is None else {"autoencoder": plan.autoencoder}),
            "num_parameters": plan.num_parameters,
            **({} if plan.start is None else {"started_from": plan.start.facts}),
            **({} if plan.width is None else {"width": plan.width.facts()}),
            **timescales_of(plan),
            "device": str(accelerator.device),
            "mixed_precision": accelerator.mixed_precision,
        },
        "config": plan.config.to_dict(),
        "meta": meta,
    }


def timescales_of(plan: Plan) -> dict[str, Any]:
    """The timescales of the optimizer in images, and the settings of its updates; nothing for one without any."""
    found: dict[str, float] = {}
    images = plan.layout.global_batch
    if (beta2 := plan.optimizer_kwargs.get("beta2")) is not None:
        found |= {"beta2": beta2, "beta2_half_life": half_life_of(beta2, images)}
    if (timescale := plan.decay_timescale) is not None:
        found |= {"weight_decay": plan.optimizer_kwargs["weight_decay"], "tau": timescale.updates * images}
        found |= {"removed_by_decay": timescale.removed}
    return {"timescales": found} if found else {}


def training_figures(trainer: Trainer) -> dict[str, Any]:
    """The figures of training so far."""
    run, divergence = trainer.run, trainer.divergence
    held, began = run.objective.sampler.held(), run.objective.sampler.began()
    return {
        "updates_done": run.update,
        "training_seconds": run.training_seconds,
        "peak_memory_mb": peak_memory_mb(),
        "schedule_audit": run.audit.state_dict(),
        "skipped_updates": divergence.num_skipped,
        "skipped_corrupt_images": run.data.skipped,
        "warnings": trainer.log.lr_warnings,
        # A sampler that holds the density that one with feedback has reached.
        **({"timestep_density": held} if held else {}),
        # The update at which it left the density before it; `null` if it never did.
        **({} if began is None else {"timestep_density_began": began or None}),
    }


@contextmanager
def recorded(trainer: Trainer, record: dict[str, Any]) -> Iterator[None]:
    """Writes the outcome of the run in this block into its record."""
    started, state = time.perf_counter(), record["run"]
    try:
        yield
        state["status"] = "finished"
    except (Interrupted, KeyboardInterrupt):
        state["status"] = "cancelled"
        raise
    except BaseException as error:
        state |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        if isinstance(error, Exception):
            trainer.folder.check_there()  # a removed folder explains more than a file not found
        raise
    finally:
        state["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        state["seconds"] += time.perf_counter() - started
        record["train"] |= training_figures(trainer)
        # An error of the disk must not hide the one that ended the run.
        with suppress(*(() if state["status"] == "finished" else (LabError,))):
            _write_end(trainer, record)


def _write_end(trainer: Trainer, record: dict[str, Any]) -> None:
    """Writes the log by noise level, the record and, last, the manifest of a finished run."""
    folder, state = trainer.folder, record["run"]
    try:
        folder.check_there()
        if (observer := trainer.log.observer) is not None and folder.is_writer:
            record["train"]["loss_spikes"] = observer.num_spikes
            write_timesteps(observer.table, folder.timesteps_file)
        folder.write_record(record)
        if state["status"] == "finished":
            folder.write_manifest()
    except LabError as error:
        if state["status"] == "finished":
            state |= {"status": "failed", "error": str(error)}
        folder.write_record(record)
        raise


# --- the end -----------------------------------------------------------------------------------------------------------


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
        plot_timesteps(trainer.log.observer.table, folder.lab / "timesteps.png")
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
    """Sends metrics and plots to the trackers."""
    trackers, update = trainer.accelerator.trackers, trainer.run.update
    if not trackers:
        return
    trainer.accelerator.log({f"results/{name}": value for name, value in figures.items()}, step=update)
    for name in ("loss", "lr", "timesteps", "samples"):
        if (file := trainer.folder.lab / f"{name}.png").exists():
            log_images(trackers, f"plots/{name}", np.asarray(Image.open(file).convert("RGB"))[None], update)
