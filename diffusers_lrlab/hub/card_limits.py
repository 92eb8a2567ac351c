"""Parts of a model card on the data, on limits, and on metrics beside the scores of real data."""

from pathlib import Path
from typing import Any

from ..core.words import counted, singular
from ..data.image_sets import IMAGE_DATASETS
from ..data.toy2d_entries import TOY_DATASETS
from ..evaluation.metrics import METRICS
from ..training.kinds.base import DataKind
from .cards import as_code

_REAL = {  # in place of samples, by the end of a result's name
    "of_training_images": "equally many training images",
    "of_held_out_images": "held-out images",
    "of_held_out_points": "held-out points",
    "of_held_out_data": "held-out data",
}


def compared_with_real_data(results: dict[str, Any]) -> str:
    """The first distance of samples for which real data have a score too, in words; empty if there is none."""
    for name, metric in METRICS.items():
        if metric.better != "smaller":
            continue
        found = ((results.get(f"{name}_{end}"), what) for end, what in _REAL.items())
        score, real = next(((score, what) for score, what in found if score is not None), (None, ""))
        if name in results and score is not None:
            return (
                f"{metric.label}: {results[name]:.3g} for samples of the model, {score:.3g} for {real}. Smaller is better; "
                "except by chance, even a perfect model scores no better than real data."
            )
    return ""


def data_facts(config: dict[str, Any], is_on_hub: bool) -> str:
    """Where the data are from, and their licence."""
    name = config["dataset_name"] or config["train_data_dir"]
    if name in IMAGE_DATASETS:
        entry = IMAGE_DATASETS[name]
        return f"`{name}`: {entry.description}. Source: {entry.source}. Licence: {entry.facts['licence']}."
    if name in TOY_DATASETS:
        return f"`{name}`: {TOY_DATASETS[name].description}. Source: {TOY_DATASETS[name].source}."
    if is_on_hub:
        return f"[{name}](https://huggingface.co/datasets/{name}): see its card for source and licence."
    return (
        f"{as_code(Path(name).name)}, a folder that is not published with the model. Ask its author for source and licence."
    )


def licence_text(licence: str | None) -> str:
    if licence is None:
        return "no licence was given (`--hub_license`). Ask its author before you use it."
    return f"{licence}."


def limits_of(config: dict[str, Any], train: dict[str, Any], kind: DataKind) -> list[str]:
    """What the model is not for, and what was not tested."""
    one, num = singular(kind.name), train["num_training_images"]
    is_new = not train.get("started_from")
    seen = f"{counted(num, one)}" if num else f"a stream of {kind.name}"
    limits = [
        f"It was trained on {seen} ({train['data_shape']}){' and makes only such samples' * is_new}.",
        f"One run with one seed ({config['seed']}): another run may be better or worse by chance.",
        "Not tested: whether it repeats training data, and which biases of the data it has learned.",
        "It is for research on training. Do not use it for decisions about people, or where samples must be accurate.",
    ]
    if not is_new:
        limits.append("The limits and the licence of the weights that it started from also apply.")
    return limits


def command_without_checkout(command: str) -> str:
    """The command of a run as the installed package has it, without a checkout of the project."""
    return command.replace("training_scripts/train_ddpm.py", "-m diffusers_lrlab.train")
