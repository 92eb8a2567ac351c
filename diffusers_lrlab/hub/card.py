"""The model card: a template, filled from the record of a run."""

from pathlib import Path
from typing import Any

from ..core.files import write_text
from ..core.project import CITATION, install_command, project_link
from ..core.spec import format_spec, shown_spec
from ..core.words import agreeing, counted, singular, times
from ..data.image_sets import IMAGE_DATASETS
from ..data.labels import describe_classes
from ..data.options import EMBEDDED_DATASETS
from ..data.sources import local_folder
from ..data.toy2d_entries import TOY_DATASETS
from ..evaluation.metrics import METRICS
from ..finder.saved_result import read_saved_result
from ..models.registry import DENOISERS, has_own_code
from ..models.start_weights import LORA_FILE
from ..schedules.registries import SCHEDULERS
from ..schedules.resolve import describe_schedule
from ..schedules.schedule import Schedule
from ..training.choices import describe_choices
from ..training.config import complete_options
from ..training.kinds.base import DataKind
from ..training.kinds.select import component_of, kind_of
from ..training.pipeline import pipeline_name
from ..training.plan_text import autoencoder_in_words
from ..training.resolve_timesteps import recorded_process
from .card_limits import command_without_checkout, compared_with_real_data, data_facts, licence_text, limits_of
from .card_sections import section_of
from .cards import as_code, fill
from .pipeline_folder import references_of
from .records import read_json

# Markdown for a LoRA beside the pipeline; the classes of models that have no LoRA in diffusers inherit its loader.
_LORA_EXAMPLE = """
This loads the weights without the trained LoRA, which is stored beside them. To load both with `peft`:

```python
{package}from diffusers import DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin
from {library} import {model}

class ModelWithLora({model}, PeftAdapterMixin):
    pass

model = ModelWithLora.from_pretrained("{location}", subfolder="{component}")
model.load_lora_adapter("{location}", prefix="{component}", use_safetensors=True)
pipeline = DiffusionPipeline.from_pretrained("{location}", {component}=model)
```
"""

_LABELS = {
    "timestep_sampler": "Timestep sampler",
    "loss_weighting": "Loss weighting",
    "timestep_lr": "Learning rate per timestep",
    "noise": "Noise in training",
}


def write_model_card(folder: Path, record: dict[str, Any]) -> None:
    """
    Writes `README.md` into the folder of a finished run, from its record. The example loads from the repository of a pushed
    run, and else from the folder.
    """
    write_text(folder / "README.md", model_card_text(folder, record))


def model_card_text(folder: Path, record: dict[str, Any], licence: str | None = None) -> str:
    """
    The text of the card of a finished run.

    Args:
        folder (`Path`): The folder of the run.
        record (`dict`): Its record.
        licence (`str`, *optional*): The licence of the model by the Hub's name; `--hub_license` of the run by default.
    """
    config = complete_options(record["config"])
    record = {**record, "config": {**config, "hub_license": licence or config["hub_license"]}}
    config, train = record["config"], record["train"]
    kind = kind_of(config)
    title = (config["hub_model_id"] or folder.resolve().name).split("/")[-1]
    return fill(
        "model_card.md",
        _card_data(record, kind, title),
        title=title,
        pipeline=pipeline_name(kind, config, folder),
        plots=section_of(kind, config).plots,
        class_rows=_class_rows(config, train),
        data=_data_text(config),
        data_facts=data_facts(config, _is_on_hub(config)),
        licence=licence_text(config["hub_license"]),
        limits=limits_of(config, train, kind),
        in_words=compared_with_real_data(train["results"]),
        project=project_link(),
        install=install_command("train"),
        command=command_without_checkout(record["run"]["command"]),
        citation=CITATION,
        held_out=counted(train["num_held_out_images"], f"held-out {singular(kind.name)}"),
        example=_example(kind, record, folder),
        results=_result_rows(train["results"]),
        distances=_distance_rows(train["results"]),
        schedule_text=_schedule_text(config, train) + _parent_text(record["run"].get("parent")),
        finder_text=_finder_text(folder, record),
        facts=_facts(record, kind),
        config=config,
        train=train,
        run=record["run"],
    )


def _class_rows(config: dict[str, Any], train: dict[str, Any]) -> str:
    """What the rows of the grid of samples are, of a run with labels."""
    names = train.get("class_names", [])
    if not names or config["eval_batch_size"] < 2 * len(names):
        return ""
    return f"One row for each class, from the top: {', '.join(map(as_code, names))}."


def _example(kind: DataKind, record: dict[str, Any], folder: Path) -> str:
    """Markdown that loads the pipeline."""
    config = record["config"]
    pipeline, denoiser = pipeline_name(kind, config, folder), config.get("denoiser")
    section, component = section_of(kind, config, pipeline), component_of(config)
    location = config["hub_model_id"] if config["push_to_hub"] else str(folder)
    labels = record["train"].get("class_names", [])[:2]
    sampling = {"inference_steps": config["num_inference_steps"], "guidance_scale": config["guidance_scale"]}
    sampling["label"] = 0 if labels else 1000  # which stands for none
    example = section.example.format(location=location, labels=labels, **sampling)
    if denoiser is None or not DENOISERS[denoiser].is_foreign:
        example += section.without_package.format(location=location)
    elif has_own_code(denoiser):
        example = (
            f"The denoiser is third-party code, `{component}/diffusers_lrlab.py`, which needs diffusers_lrlab. Read it, "
            f"and import a copy of it first.\n\n{example}"
        )
    if (folder / LORA_FILE).is_file():
        library, model = read_json(folder / "model_index.json")[component]
        package = "import diffusers_lrlab\n" if (folder / "pipeline.py").is_file() else ""  # of the pipeline
        names = {"library": library, "model": model, "component": component, "package": package}
        example += _LORA_EXAMPLE.format(location=location, **names)
    for name, reference in references_of(folder).items():
        if pipeline in ("LatentImagePipeline", "DiTImagePipeline"):
            example += f"\nIts `{name}` is loaded from `{reference.name_or_path}` when it is first needed.\n"
            continue
        example += f"\nIts `{name}` is loaded from elsewhere. Pass it to `from_pretrained` as `{name}={reference.call}`.\n"
    return example


def _result_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of (metric, value), without the distances of [`_distance_rows`]."""
    labels: dict[str, str] = {}
    for name, metric in METRICS.items():
        if metric.of != "samples" and f"{name}_standard_error" not in results:
            labels |= {name: metric.card_label} | {f"{name}_{end}": label for end, label in metric.besides.items()}
    labels["loss"] = "Training loss, last row of the log"
    rows = [(label, f"{results[key]:.4g}") for key, label in labels.items() if key in results]
    if "frechet_features" in results:
        rows.append(("Features of the Fréchet distance", results["frechet_features"]))
        rows.append(("Samples for the Fréchet distance", str(results["frechet_num_samples"])))
    if "class_accuracy" in results:
        num = results["class_accuracy_num_samples"]
        right, error = round(num * results["class_accuracy"]), results["class_accuracy_error_of_classifier"]
        text = f"{right:,} of {num:,}, by a classifier that misreads {100 * error:.2g} % of held-out images"
        rows.append(("Samples classified as the requested class", text))
        rows.append(("Classifier", results["class_accuracy_classifier"]))
    return rows


def _distance_rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of (distance, score of samples, score of held-out data)."""
    rows, with_error = [], []
    for name, metric in METRICS.items():
        if name in results and metric.of == "samples":
            floors = [results.get(f"{name}_of_held_out_{items}") for items in ("points", "images", "data")]
            floor = next((floor for floor in floors if floor is not None), None)
            rows.append((metric.card_label, f"{results[name]:.4g}", "–" if floor is None else f"{floor:.4g}"))
        elif f"{name}_standard_error" in results:
            value = f"{results[name]:.4g} ± {results[f'{name}_standard_error']:.2g}"
            with_error.append((metric.card_label, value, "–"))
    return rows + with_error


def _schedule_text(config: dict[str, Any], train: dict[str, Any]) -> str:
    names = ("lr_scheduler", "lr_scheduler_kwargs", "momentum_scheduler", "momentum_scheduler_kwargs")
    schedule = Schedule(*(config[name] for name in names))
    origin = f" (`{config['lr_scheduler_source']}`)" if config["lr_scheduler_source"] else ""
    text = (
        f"`{describe_schedule(schedule)}`{origin}, with a peak of {train['peak_learning_rate']:g} after "
        f"{counted(train['warmup_updates'], 'update')} of warm-up, {counted(train['num_updates'], 'update')} in all. "
    )
    for rollback in train["rollbacks"]:
        text += (
            f"The run diverged around update {rollback['diverged_at']}, went back to update {rollback['back_to']}, and "
            f"continued at {rollback['lr_factor']:g} of this curve. "
        )
    if skipped := train["skipped_updates"]:
        were = agreeing(skipped, "was", "were")
        text += f"{counted(skipped, 'update')} {were} skipped, as the gradients were not finite. "
    if "feedback" in SCHEDULERS[config["lr_scheduler"]].traits:
        return text + "The rate follows the validation loss."
    deviation = train["schedule_audit"]["largest_lr_deviation"]
    exact = "exactly the one of this curve" if deviation == 0 else f"within {deviation:.1g} of the peak of this curve"
    return text + f"Checked at every update: the rate in the optimizer was {exact}."


def _parent_text(parent: dict[str, Any] | None) -> str:
    """Where an extended or a branched run comes from."""
    if parent is None:
        return ""
    changed = (f"`{name}` {now} in place of {before}" for name, (before, now) in parent.get("changed", {}).items())
    since = "".join(f", with {change} from there on" for change in changed)
    commit = f", commit `{parent['git_commit'][:12]}`" if parent["git_commit"] else ""
    return (
        f" The run was {parent['how']} at update {parent['update']} from `{Path(parent['folder']).name}`, which had "
        f"`{parent['schedule']}` over {counted(parent['num_updates'], 'update')}{commit}{since}. Its log and plots "
        "show both parts."
    )


def _finder_text(folder: Path, record: dict[str, Any]) -> str | None:
    found = read_saved_result(folder, record)
    if found is None:
        return None
    rule = found["settings"]["rule"]
    suggestion = found["suggestions"][rule]
    rate = "no rate" if found["learning_rate"] is None else f"{found['learning_rate']:g}"
    return (
        f"The finder's test before the run (`{rule}`, {times(len(found['sweeps']))}, {found['seconds']:.0f} s) names "
        f"{rate}: {suggestion['reason']}."
    )


def _data_text(config: dict[str, Any]) -> str:
    name = config["dataset_name"] or config["train_data_dir"]
    if name in IMAGE_DATASETS:
        return IMAGE_DATASETS[name].facts["title"]
    if name in TOY_DATASETS:
        return f"the toy set `{name}` ({TOY_DATASETS[name].description})"
    return f"[{name}](https://huggingface.co/datasets/{name})" if _is_on_hub(config) else f"`{name}`"


def _is_on_hub(config: dict[str, Any]) -> bool:
    """Whether the data set is on the Hub, rather than embedded or a folder."""
    name = config["dataset_name"]
    return name is not None and name not in EMBEDDED_DATASETS and local_folder(name) is None


def _facts(record: dict[str, Any], kind: DataKind) -> list[tuple[str, Any]]:
    config, train, meta = record["config"], record["train"], record["meta"]
    things, denoiser = kind.name, config.get("denoiser")
    commit = meta["git_commit"]  # an installed package has none
    processes = f"{counted(train['num_processes'], 'process')} on {train['device']}"
    return [
        (f"Training {things}", f"{train['num_training_images'] or 'stream'} ({train['num_held_out_images']} held out)"),
        (f"Shape of {things}", train["data_shape"]),
        *([("Autoencoder", autoencoder_in_words(train["autoencoder"]))] if train.get("autoencoder") else []),
        *([("Denoiser", f"`{format_spec(denoiser, config['denoiser_kwargs'])}`")] if denoiser else []),
        *_label_facts(config, train),
        ("Parameters", f"{train['num_parameters']:,}"),
        *_start(config, train),
        ("Updates", f"{train['num_updates']} of {train['global_batch']} {things}"),
        ("Objective", f"`{config['objective']}`"),
        *recorded_process(config).describe(),
        ("Steps of sampling", config["num_inference_steps"]),
        *((_LABELS.get(option, option), f"`{spec}`") for option, spec in describe_choices(config)),
        *_beginning(config, train),
        ("Optimizer", f"`{shown_spec(config['optimizer'], config['optimizer_kwargs'])}`"),
        ("Seed", config["seed"]),
        ("Training time", f"{train['training_seconds']:.0f} s, without validation and sampling"),
        ("Peak memory", f"{train['peak_memory_mb']:.0f} MB"),
        ("Hardware", f"{processes}; {meta['processor']}, {counted(meta['cpu_cores'], 'core')}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in meta["versions"].items())),
        *([("Commit", commit + (" with local changes" if meta["git_dirty"] else ""))] if commit else []),
    ]


def _beginning(config: dict[str, Any], train: dict[str, Any]) -> list[tuple[str, str]]:
    """From which update on the timesteps had their own density, if that waits for losses."""
    if "timestep_density_began" not in train:  # of another sampler, or an older version
        return []
    began, before = train["timestep_density_began"], config["timestep_sampler_kwargs"]["before"]
    text = f"never: all updates had `{before}`" if began is None else f"update {began:,}; `{before}` until then"
    return [("Its own density began at", text)]


def _label_facts(config: dict[str, Any], train: dict[str, Any]) -> list[tuple[str, Any]]:
    if config["label_column"] is None:
        return []
    return [
        ("Classes", f"`{config['label_column']}`, {describe_classes([*map(as_code, train['class_names'])])}"),
        ("Label dropout", config["label_dropout"]),
        ("Guidance scale", config["guidance_scale"]),
    ]


def _start(config: dict[str, Any], train: dict[str, Any]) -> list[tuple[str, Any]]:
    """The weights that the model started from, and its LoRA."""
    if (start := train.get("started_from")) is None:
        return []
    name, commit = start["name_or_path"], start["commit"]
    source = f"[{name}](https://huggingface.co/{name}) at `{commit}`" if commit else f"`{name}`"
    rows = [("Started from the weights of", f"{source}, SHA-256 `{start['sha256'][:16]}`")]
    if config["lora_rank"] is None:
        return rows
    targets = f", on `{config['lora_target_modules']}`" if config["lora_target_modules"] else ""
    where = "added to the weights" if config["merge_lora"] else f"beside the weights, in `{LORA_FILE}`"
    lora = f"rank {config['lora_rank']}, alpha {config['lora_alpha']:g}{targets}, {where}"
    return [*rows, ("LoRA", lora), ("Trained parameters", f"{train['num_trained_parameters']:,}")]


def _card_data(record: dict[str, Any], kind: DataKind, title: str) -> Any:
    """Metadata for the Hub, with the results as a model-index."""
    from huggingface_hub import EvalResult, ModelCardData

    config, results = record["config"], record["train"]["results"]
    section = section_of(kind, config)
    name, on_hub = config["dataset_name"] or config["train_data_dir"], _is_on_hub(config)
    start, lora = record["train"].get("started_from", {}), ["lora"] if config["lora_rank"] else []
    evaluations = [
        EvalResult(
            task_type=section.task,
            dataset_type=name if on_hub else Path(name).name,
            dataset_name=Path(name).name,
            metric_type=metric.hub_type or metric.name,
            metric_name=metric.card_label,
            metric_value=results[metric.name],
            verified=False,  # measured by this run alone
        )
        for metric in METRICS.values()
        if metric.on_hub and metric.name in results
    ]
    return ModelCardData(
        library_name="diffusers",
        license=config["hub_license"],
        pipeline_tag=None if section.task == "other" else section.task,
        tags=["diffusers", "diffusers-training", *section.tags, *lora, "diffusers_lrlab", config["lr_scheduler"]],
        datasets=[name] if on_hub else None,
        metrics=sorted({evaluation.metric_type for evaluation in evaluations}) or None,
        base_model=start["name_or_path"] if start.get("commit") else None,
        model_name=title if evaluations else None,
        eval_results=evaluations or None,
    )
