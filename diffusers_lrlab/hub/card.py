"""The model card: a template, filled from the record of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.environment import citation, install_command, project_link
from ..core.files import write_text
from ..core.words import agreeing, counted, singular, times
from ..evaluation.metrics import METRICS
from ..finder.result import read_saved_result
from ..models.registry import DENOISERS, has_own_code
from ..schedules.schedule import Schedule, describe_schedule
from ..training.config import complete_options
from ..training.kinds import DataKind, component_of, kind_of, row_for
from ..training.pipeline import pipeline_name
from ..training.record_schema import read_json
from .card_facts import as_code, describe_data, distance_rows, facts_of, fill, result_rows


@dataclass(frozen=True)
class CardSection:
    """The text of a card on a kind of data. A kind of another package puts its own under its name into [`CARD_SECTIONS`]."""

    task: str = "other"  # the Hub's name for what the model does; "other" declares none
    tags: tuple[str, ...] = ()  # beside those of all cards
    # Markdown that loads the pipeline and samples, with `{location}`, `{inference_steps}` and `{guidance_scale}`.
    example: str = """```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{location}")
```
"""
    # Markdown with `{location}`, for the default model in a pipeline of this package: how both load without the package.
    without_package: str = ""
    plots: str = ""  # Markdown of plots that only this kind has


_WITHOUT_PACKAGE = """
Without diffusers_lrlab, with the code that is stored beside the weights; read it first:

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained(
    "{location}", custom_pipeline="{location}", trust_remote_code=True
)
```
"""


def _loading(call: str, made: str = "images", pipeline: str = "DiffusionPipeline", own: bool = True) -> str:
    """Markdown that loads a pipeline, which needs this package if it is its `own`, and calls it."""
    imports = "import diffusers_lrlab\n" * own
    return f"""```python
{imports}from diffusers import {pipeline}

pipeline = {pipeline}.from_pretrained("{{location}}")
{made} = pipeline({call}).{made}
```
"""


_STEPS, _UNCONDITIONAL = "num_inference_steps={inference_steps}", "unconditional-image-generation"
CARD_SECTIONS: dict[str, CardSection] = {
    "images": CardSection(
        _UNCONDITIONAL, (_UNCONDITIONAL,), _loading(f"batch_size=16, {_STEPS}", pipeline="DDPMPipeline", own=False)
    ),
    "latents": CardSection(
        _UNCONDITIONAL, (_UNCONDITIONAL, "latent-diffusion"), _loading(f"batch_size=16, {_STEPS}"), _WITHOUT_PACKAGE
    ),
    "points": CardSection(
        tags=("points",),
        example=_loading(f"num_points=10_000, {_STEPS}", "points"),
        without_package=_WITHOUT_PACKAGE,
        plots="""
![From noise to data](lrlab/trajectory.png)
""",
    ),
}

_LABELLED_EXAMPLE = _loading(f"class_labels={{labels}}, {_STEPS}")  # `{labels}` are some names of classes


def section_of(kind: DataKind, config: dict[str, Any], pipeline: str = "") -> CardSection:
    """The parts of the card of a run, by its recorded configuration and the class of its pipeline."""
    section, is_labelled = row_for(kind, CARD_SECTIONS, CardSection()), config["label_column"] is not None
    if is_labelled and section.task == _UNCONDITIONAL:
        tags = ("class-conditional-image-generation", *section.tags[1:])
        section = CardSection("other", tags, _LABELLED_EXAMPLE, _WITHOUT_PACKAGE)
    if pipeline == "ImagePipeline" and not is_labelled:  # is called as the pipeline of latents is
        called_alike = CARD_SECTIONS["latents"]
        return replace(section, example=called_alike.example, without_package=called_alike.without_package)
    return section


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
        licence (`str`, *optional*): The licence of the model by the Hub's name.
    """
    config = complete_options(record["config"])
    record = {**record, "config": config}
    train = record["train"]
    kind, (data, _, data_facts) = kind_of(config), describe_data(config)
    title = (config["hub_model_id"] or folder.resolve().name).split("/")[-1]
    return fill(
        "model_card.md",
        _card_data(record, kind, title, licence),
        title=title,
        pipeline=pipeline_name(kind, config, folder),
        plots=section_of(kind, config).plots,
        class_rows=_class_rows(config, train),
        data=data,
        data_facts=data_facts,
        seen=counted(num, singular(kind.name)) if (num := train["num_training_images"]) else f"a stream of {kind.name}",
        licence=licence or "the licence in the metadata of this card; without one, ask its author before you use it",
        project=project_link(),
        install=install_command("train"),
        command=record["run"]["command"].replace("training_scripts/train_ddpm.py", "-m diffusers_lrlab.train"),
        citation=citation(),
        held_out=counted(train["num_held_out_images"], f"held-out {singular(kind.name)}"),
        example=_example(kind, record, folder),
        results=result_rows(train["results"]),
        distances=distance_rows(train["results"]),
        schedule_text=_schedule_text(config, train) + _parent_text(record["run"].get("parent")),
        finder_text=_finder_text(folder, record),
        facts=facts_of(record, kind),
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
    example = section.example.format(location=location, labels=labels, **sampling)
    if denoiser is None or not DENOISERS[denoiser].is_foreign:
        example += section.without_package.format(location=location)
    elif has_own_code(denoiser):
        example = (
            f"The denoiser is third-party code, `{component}/diffusers_lrlab.py`, which needs diffusers_lrlab. Read it, "
            f"and import a copy of it first.\n\n{example}"
        )
    index = folder / "model_index.json"
    if source := read_json(index).get("vae_source") if index.is_file() else None:
        example += f"\nIts `vae` is loaded from `{source['name_or_path']}` when it is first needed.\n"
    return example


def _schedule_text(config: dict[str, Any], train: dict[str, Any]) -> str:
    names = ("lr_scheduler", "lr_scheduler_kwargs", "momentum_scheduler", "momentum_scheduler_kwargs")
    schedule = Schedule(*(config[name] for name in names))
    text = (
        f"`{describe_schedule(schedule)}`, with a peak of {train['peak_learning_rate']:g} after "
        f"{counted(train['warmup_updates'], 'update')} of warm-up, {counted(train['num_updates'], 'update')} in all. "
    )
    if skipped := train["skipped_updates"]:
        were = agreeing(skipped, "was", "were")
        text += f"{counted(skipped, 'update')} {were} skipped, as the gradients were not finite. "
    if schedule.follows_metric:
        return text + "The rate follows the validation loss."
    deviation = train["schedule_audit"]["largest_lr_deviation"]
    exact = "exactly the one of this curve" if deviation == 0 else f"within {deviation:.1g} of the peak of this curve"
    return text + f"Checked at every update: the rate in the optimizer was {exact}."


def _parent_text(parent: dict[str, Any] | None) -> str:
    """The checkpoint that a run started from."""
    if parent is None:
        return ""
    commit = f", commit `{parent['git_commit'][:12]}`" if parent["git_commit"] else ""
    return (
        f" The run started from update {parent['update']} of `{Path(parent['folder']).name}`, which had "
        f"`{parent['schedule']}` over {counted(parent['num_updates'], 'update')}{commit}. Its log and plots show both parts."
    )


def _finder_text(folder: Path, record: dict[str, Any]) -> str | None:
    found = read_saved_result(folder, record)
    if found is None:
        return None
    rate = "no rate" if found["learning_rate"] is None else f"{found['learning_rate']:g}"
    return (
        f"The finder's test before the run ({times(len(found['sweeps']))}, {found['seconds']:.0f} s) names {rate}: "
        f"{found['suggestion']['reason']}."
    )


def _card_data(record: dict[str, Any], kind: DataKind, title: str, licence: str | None) -> Any:
    """Metadata for the Hub, with the results as a model-index."""
    from huggingface_hub import EvalResult, ModelCardData

    config, results = record["config"], record["train"]["results"]
    section = section_of(kind, config)
    name, (_, on_hub, _) = config["dataset_name"] or config["train_data_dir"], describe_data(config)
    start = record["train"].get("started_from", {})
    evaluations = [
        EvalResult(
            task_type=section.task,
            dataset_type=on_hub or Path(name).name,
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
        license=licence,
        pipeline_tag=None if section.task == "other" else section.task,
        tags=["diffusers", "diffusers-training", *section.tags, "diffusers_lrlab", config["lr_scheduler"]],
        datasets=[on_hub] if on_hub else None,
        metrics=sorted({evaluation.metric_type for evaluation in evaluations}) or None,
        base_model=start["name_or_path"] if start.get("commit") else None,
        model_name=title if evaluations else None,
        eval_results=evaluations or None,
    )
