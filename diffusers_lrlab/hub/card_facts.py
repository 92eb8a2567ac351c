"""What cards say: their templates, and for models facts, results beside those of real data, and data with their licence."""

import re
from pathlib import Path
from typing import Any

from ..core.spec import format_spec, shown_spec
from ..core.words import counted
from ..data.image_sets import IMAGE_DATASETS
from ..data.labels import describe_classes
from ..data.sources import local_folder
from ..data.toy2d import TOY_DATASETS
from ..evaluation.metrics import METRICS
from ..training.kinds import DataKind
from ..training.plan_text import autoencoder_in_words
from ..training.resolve import describe_choices, recorded_process

_LABELS = {
    "timestep_sampler": "Timestep sampler",
    "loss_weighting": "Loss weighting",
    "timestep_lr": "Learning rate per timestep",
    "noise": "Noise in training",
}


def fill(template: str, metadata: Any, **values: Any) -> str:
    """The text of a card, from a Jinja template of this folder. `metadata` is a `huggingface_hub.CardData`."""
    from huggingface_hub import RepoCard

    return str(RepoCard.from_template(metadata, template_path=str(Path(__file__).parent / template), **values))


def as_code(text: str) -> str:
    """Text of a third party as Markdown code, without what would end the code or the cell of a table."""
    return f"`{' '.join(re.sub('[`|]', ' ', text).split())}`"


def facts_of(record: dict[str, Any], kind: DataKind) -> list[tuple[str, Any]]:
    """Rows of (name, value) about a run."""
    config, train, meta = record["config"], record["train"], record["meta"]
    things, labels, denoiser = kind.name, config["label_column"], config.get("denoiser")
    processes = f"{counted(train['num_processes'], 'process')} on {train['device']}"
    rows = [
        (f"Training {things}", f"{train['num_training_images'] or 'stream'} ({train['num_held_out_images']} held out)"),
        (f"Shape of {things}", train["data_shape"]),
        ("Autoencoder", autoencoder_in_words(train["autoencoder"]) if train.get("autoencoder") else None),
        ("Denoiser", f"`{format_spec(denoiser, config['denoiser_kwargs'])}`" if denoiser else None),
        ("Classes", f"`{labels}`, {describe_classes([*map(as_code, train['class_names'])])}" if labels else None),
        ("Label dropout", config["label_dropout"] if labels else None),
        ("Guidance scale", config["guidance_scale"] if labels else None),
        ("Parameters", f"{train['num_parameters']:,}"),
        ("Started from the weights of", _start(train.get("started_from"))),
        ("Updates", f"{train['num_updates']} of {train['global_batch']} {things}"),
        ("Objective", f"`{config['objective']}`"),
        *recorded_process(config).describe(),
        ("Steps of sampling", config["num_inference_steps"]),
        *((_LABELS.get(option, option), f"`{spec}`") for option, spec in describe_choices(config)),
        ("Its own density began at", _beginning(config, train)),
        ("Optimizer", f"`{shown_spec(config['optimizer'], config['optimizer_kwargs'])}`"),
        ("Seed", config["seed"]),
        ("Training time", f"{train['training_seconds']:.0f} s, without validation and sampling"),
        ("Peak memory", f"{train['peak_memory_mb']:.0f} MB"),
        ("Hardware", f"{processes}; {meta['processor']}, {counted(meta['cpu_cores'], 'core')}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in meta["versions"].items())),
        # An installed package has no commit; `git_dirty` is None if git did not say.
        ("Commit", meta["git_commit"] and f"{meta['git_commit']}{' with local changes' if meta['git_dirty'] else ''}"),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _beginning(config: dict[str, Any], train: dict[str, Any]) -> str | None:
    """From which update on the timesteps had their own density, if that waits for losses."""
    if "timestep_density_began" not in train:  # of another sampler, or an older version
        return None
    began, before = train["timestep_density_began"], config["timestep_sampler_kwargs"]["before"]
    return f"never: all updates had `{before}`" if began is None else f"update {began:,}; `{before}` until then"


def _start(start: dict[str, Any] | None) -> str | None:
    """The weights that the model started from."""
    if start is None:
        return None
    name, commit = start["name_or_path"], start["commit"]
    source = f"[{name}](https://huggingface.co/{name}) at `{commit}`" if commit else f"`{name}`"
    return f"{source}, SHA-256 `{start['sha256'][:16]}`"


def result_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of (metric, value), without the distances of [`distance_rows`]."""
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


def distance_rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
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


def describe_data(config: dict[str, Any]) -> tuple[str, str | None, str]:
    """The data in Markdown, their id on the Hub if they are there, and where they are from, with their licence."""
    name = config["dataset_name"] or config["train_data_dir"]
    if name in IMAGE_DATASETS:
        entry = IMAGE_DATASETS[name]
        facts = f"`{name}`: {entry.description}. Source: {entry.source}. Licence: {entry.facts['licence']}."
        return entry.facts["title"], None, facts
    if name in TOY_DATASETS:
        about = TOY_DATASETS[name].description
        return f"the toy set `{name}` ({about})", None, f"`{name}`: {about}. Source: {TOY_DATASETS[name].source}."
    if config["dataset_name"] is not None and local_folder(name) is None:
        link = f"[{name}](https://huggingface.co/datasets/{name})"
        return link, name, f"{link}: see its card for source and licence."
    not_published = "a folder that is not published with the model. Ask its author for source and licence."
    return f"`{name}`", None, f"{as_code(Path(name).name)}, {not_published}"
