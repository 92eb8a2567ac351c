"""The model card: a template, filled from the record of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import write_text
from ..schedules.catalogue import SCHEDULERS
from ..schedules.frame import Schedule
from ..schedules.resolve import describe_schedule
from ..schedules.spec import format_spec
from ..training.checks import local_folder
from ..training.config import EMBEDDED_DEFAULTS, TrainingConfig
from ..training.timestep_choices import describe_choices

TEMPLATE = Path(__file__).parent / "model_card.md"

_LABELS = {
    "timestep_sampler": "Timestep sampler",
    "loss_weighting": "Loss weighting",
    "timestep_lr": "Learning rate per timestep",
    "noise": "Noise in training",
}
_METRICS = {
    "validation_loss_ema": "Validation loss, EMA weights (the ones saved)",
    "validation_loss": "Validation loss, raw weights",
    "frechet_distance": "Fréchet distance of samples to held-out images",
    "frechet_distance_of_training_images": "the same, of as many training images",
    "frechet_distance_of_two_real_halves": "the same, between two halves of the real images",
    "loss": "Training loss, last row of the log",
}


def write_model_card(folder: Path, record: dict[str, Any], location: str | None = None) -> None:
    """
    Writes `README.md` into the folder of a finished run.

    Args:
        folder (`Path`): Of the run.
        record (`dict`): Its `run.json`.
        location (`str`, *optional*): What the loading example names; the repository's id for a run that is pushed, the
            folder for others.
    """
    from huggingface_hub import ModelCard

    config, train = record["config"], record["train"]
    title = (config["hub_model_id"] or folder.resolve().name).split("/")[-1]
    card = ModelCard.from_template(
        card_data=_card_data(record, title),
        template_path=str(TEMPLATE),
        title=title,
        pipeline="DDPMPipeline",
        data=_data_text(config),
        lr_scheduler=config["lr_scheduler"],
        location=location or (config["hub_model_id"] if config["push_to_hub"] else str(folder)),
        inference_steps=config["ddpm_num_inference_steps"],
        results=_result_rows(train["results"]),
        num_held_out=train["num_held_out_images"],
        schedule_text=_schedule_text(config, train),
        command=record["run"]["command"],
        facts=_facts(record),
        timestep_bins=config["log_timestep_bins"],
    )
    write_text(folder / "README.md", str(card))


def _result_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, f"{results[key]:.4g}") for key, name in _METRICS.items() if key in results]
    if "frechet_features" in results:
        rows.append(("Features of the Fréchet distance", results["frechet_features"]))
        rows.append(("Samples for the Fréchet distance", str(results["frechet_num_samples"])))
    return rows


def _schedule_text(config: dict[str, Any], train: dict[str, Any]) -> str:
    schedule = Schedule(
        config["lr_scheduler"],
        config["lr_scheduler_kwargs"],
        config["momentum_scheduler"],
        config["momentum_scheduler_kwargs"],
    )
    text = (
        f"`{describe_schedule(schedule)}`, with a peak of {config['learning_rate']:g} after {train['warmup_updates']} "
        "updates of warm-up, "
        f"{train['num_updates']} updates in all. "
    )
    if "feedback" in SCHEDULERS[config["lr_scheduler"]].traits:
        return text + "The rate follows the validation loss."
    deviation = train["schedule_audit"]["largest_lr_deviation"]
    exact = "exactly the one of this curve" if deviation == 0 else f"within {deviation:.1g} of the peak of this curve"
    return text + f"Checked at every update: the rate in the optimizer was {exact}."


def _data_text(config: dict[str, Any]) -> str:
    name = config["dataset_name"] or config["train_data_dir"]
    if name == "digits":
        return "scikit-learn's handwritten digits"
    return f"[{name}](https://huggingface.co/datasets/{name})" if _is_on_hub(config) else f"`{name}`"


def _is_on_hub(config: dict[str, Any]) -> bool:
    """Whether the data set is one of the Hub, rather than an embedded one or a folder."""
    name = config["dataset_name"]
    return name is not None and name not in EMBEDDED_DEFAULTS and local_folder(name) is None


def _facts(record: dict[str, Any]) -> list[tuple[str, Any]]:
    config, train, meta = record["config"], record["train"], record["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    return [
        ("Training images", f"{train['num_training_images'] or 'stream'} ({train['num_held_out_images']} held out)"),
        ("Resolution", f"{config['image_channels']} x {config['resolution']} x {config['resolution']}"),
        ("Parameters", f"{train['num_parameters']:,}"),
        ("Updates", f"{train['num_updates']} of {train['global_batch']} images"),
        ("Prediction type", config["prediction_type"]),
        *((_LABELS[option], f"`{spec}`") for option, spec in describe_choices(TrainingConfig(**config))),
        ("Optimizer", f"`{format_spec(config['optimizer'], config['optimizer_kwargs'])}`"),
        ("Seed", config["seed"]),
        ("Training time", f"{train['training_seconds']:.0f} s, without validation and sampling"),
        ("Peak memory", f"{train['peak_memory_mb']:.0f} MB"),
        (
            "Hardware",
            f"{train['num_processes']} process(es) on {train['device']}; {meta['processor']}, {meta['cpu_cores']} cores",
        ),
        ("Versions", versions),
        # An installed package has no commit.
        *(
            [("Commit", meta["git_commit"] + (" with local changes" if meta["git_dirty"] else ""))]
            if meta["git_commit"]
            else []
        ),
    ]


def _card_data(record: dict[str, Any], title: str) -> Any:
    """Metadata that the Hub reads, among it the results as a model-index."""
    from huggingface_hub import EvalResult, ModelCardData

    config, results = record["config"], record["train"]["results"]
    name = config["dataset_name"] or config["train_data_dir"]
    on_hub = _is_on_hub(config)
    evaluations = [
        EvalResult(
            task_type="unconditional-image-generation",
            dataset_type=name if on_hub else Path(name).name,
            dataset_name=Path(name).name,
            metric_type=key,
            metric_name=_METRICS[key],
            metric_value=results[key],
        )
        for key in ("validation_loss_ema", "validation_loss", "frechet_distance")
        if key in results
    ]
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag="unconditional-image-generation",
        tags=[
            "diffusers",
            "diffusers-training",
            "unconditional-image-generation",
            "diffusers_lrlab",
            config["lr_scheduler"],
        ],
        datasets=[name] if on_hub else None,
        model_name=title if evaluations else None,
        eval_results=evaluations or None,
    )
