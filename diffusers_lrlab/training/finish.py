"""The end of a run: the pipeline, final samples, the Fréchet distance, plots and card."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..evaluation.frechet import digit_features, frechet_distance
from .environment import peak_memory_mb
from .loop import Trainer
from .samples import draw_samples, load_previews, to_tensor

_NOT_RESULTS = ("update", "images_seen", "loss_spike_bins")


def finish_run(trainer: Trainer, record: dict[str, Any]) -> None:
    """Saves everything that a finished run consists of, the weights first; adds the results to `record`."""
    accelerator, config, folder = trainer.accelerator, trainer.config, trainer.folder
    trainer.save_result()
    if accelerator.is_main_process:
        rows = folder.read_metrics()
        results = {key: value for row in rows[-2:] for key, value in row.items() if key not in _NOT_RESULTS}
        record["train"]["results"] = results
        with trainer.averaged_weights():
            images = draw_samples(trainer.unet, trainer.noise_scheduler, config.eval_batch_size, config)
            if config.frechet_samples:
                results.update(_frechet_results(trainer))
        trainer.keep_samples(images)
        record["train"]["training_seconds"] = trainer.training_seconds
        record["train"]["schedule_audit"] = trainer.audit.state_dict()
        record["train"]["peak_memory_mb"] = peak_memory_mb()

        from ..hub.card import write_model_card
        from .plots import plot_losses, plot_lr, plot_progress, plot_samples
        from .timestep_plots import plot_timesteps

        plot_losses(rows, folder.lab / "loss.png")
        plot_lr(rows, trainer.plan, folder.lab / "lr.png")
        plot_progress(load_previews(folder.lab / "samples"), trainer.plan.num_updates, folder.lab / "progress.png")
        plot_samples(images, folder.lab / "samples.png")
        if trainer.observer is not None:
            plot_timesteps(trainer.observer.log.table, folder.lab / "timesteps.png")
        write_model_card(folder.path, record)
        accelerator.print(f"Finished: DDPMPipeline.from_pretrained({str(folder.path)!r}). Card: {folder.path}/README.md")
    accelerator.wait_for_everyone()


def _frechet_results(trainer: Trainer) -> dict[str, Any]:
    """Samples against held-out images, and what real images score in their place."""
    features = digit_features()
    num_samples = trainer.config.frechet_samples
    samples = features(
        to_tensor(
            draw_samples(trainer.unet, trainer.noise_scheduler, num_samples, trainer.config, "frechet", show_progress=True)
        )
    )
    held_out = features(trainer.data.held_out)
    training = features(trainer.data.all_pixels())
    # In a random order: neighbours in the data set were written by the same people.
    training = training[np.random.default_rng(0).permutation(len(training))]
    return {
        "frechet_distance": frechet_distance(samples, held_out),
        "frechet_distance_of_training_images": frechet_distance(training[:num_samples], held_out),
        "frechet_distance_of_two_real_halves": frechet_distance(*_halves(training, held_out)),
        "frechet_num_samples": num_samples,
        "frechet_features": "32 penultimate units of scikit-learn's MLPClassifier((64, 32), random_state=0) on digits",
    }


def _halves(training: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    real = np.concatenate([training, held_out])
    order = np.random.default_rng(0).permutation(len(real))
    return real[order[: len(real) // 2]], real[order[len(real) // 2 :]]
