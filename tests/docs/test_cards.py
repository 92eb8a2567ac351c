"""The cards in model_cards/: each has what a card should have; those of models are what the program writes."""

import importlib
import inspect
import json
import re

import printed
import yaml
from huggingface_hub import DatasetCardData, ModelCardData
from tables import cases

CARDS = printed.ROOT / "model_cards"
EVERY = sorted(path.name for path in CARDS.iterdir())
STUDIES = [name for name in EVERY if (CARDS / name / "summary.json").exists()]
MODELS = [name for name in EVERY if name not in STUDIES]
METRICS_OF_THE_HUB = {"accuracy", "mse"}  # of huggingface.co/metrics
_WRITTEN_BESIDE = {"configs", "model-index", "tags"}  # read by the viewer, or written by these classes


def read(name):
    """The metadata and the text of a card."""
    _, front, text = (CARDS / name / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def fields_of(kind):
    return {*inspect.signature(kind.__init__).parameters} | _WRITTEN_BESIDE


@cases("name", MODELS)
def test_a_card_is_what_the_program_writes_from_its_files(name):
    with printed.docs_modules():
        text = importlib.import_module("cards").text_of(CARDS / name)
    there = (CARDS / name / "README.md").read_text(encoding="utf-8")
    assert text == there, f"{name} is out of date: python docs/cards.py"


@cases("name", EVERY)
def test_a_card_names_no_machine_and_needs_no_checkout(name):
    metadata, text = read(name)
    assert metadata["license"] == "apache-2.0"
    assert re.findall(r"(?:/root|/home|/tmp|/work|/mnt|[A-Z]:\\)[\w/]*", text) == []
    blocks = re.findall(r"^`{3,}bash\n(.*?)^`{3,}$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    install, command = blocks[0].strip().splitlines()
    assert install.startswith("pip install")
    assert re.match(r"lrlab |accelerate launch -m diffusers_lrlab", command)
    assert "training_scripts" not in text
    assert "## Citation" in text
    pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert [file for alt, file in pictures if not alt or not (CARDS / name / file).is_file()] == []


@cases("name", STUDIES)
def test_the_card_of_a_study_has_what_the_viewer_and_its_readers_need(name):
    metadata, text = read(name)
    summary = json.loads((CARDS / name / "summary.json").read_text())
    assert {*metadata} <= fields_of(DatasetCardData)
    assert (metadata["pretty_name"], metadata["size_categories"]) == (summary["study"]["title"], ["n<1K"])
    files = [data["path"] for config in metadata["configs"] for data in config["data_files"]]
    assert files == [file for file in ("summary.parquet", "runs.parquet") if (CARDS / name / file).exists()]
    sources = {claim["source"] for claim in summary.get("claims", ())}
    numbers = {source.removeprefix("arXiv ") for source in sources if source.startswith("arXiv ")}
    assert {tag.removeprefix("arxiv:") for tag in metadata["tags"] if tag.startswith("arxiv:")} == numbers
    assert all(f"](https://arxiv.org/abs/{number})" in text for number in numbers)
    assert f'load_dataset("{name}"' in text
    heads = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert {"Strength of the evidence", "Use", "Repeat the study", "Cost", "Versions and hardware"} <= {*heads} | (
        {"Strength of the evidence"} if len(summary["study"]["seeds"]) == 1 else set()  # nothing was tested
    )
    assert f"--out {summary['study']['name']}\n" in text or f"--out {summary['study']['name']} " in text
    shown = {file for _, file in re.findall(r"!\[(.*?)\]\((.*?)\)", text)}
    assert shown == {path.name for path in (CARDS / name).glob("*.png")}


@cases("name", MODELS)
def test_the_card_of_a_model_says_what_it_is_and_is_not_for(name):
    metadata, text = read(name)
    assert {*metadata} <= fields_of(ModelCardData)
    declared = [metric for result in metadata["model-index"][0]["results"] for metric in result["metrics"]]
    assert {metric["type"] for metric in declared} | {*metadata["metrics"]} <= METRICS_OF_THE_HUB
    heads = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert {"Use", "Results", "Data and licence", "Limits", "How it was made", "Citation"} <= {*heads}
    results = json.loads((CARDS / name / "lrlab" / "run.json").read_text())["train"]["results"]
    for key in ("frechet_distance", "frechet_distance_of_training_images"):
        assert f"| {results[key]:.4g} |" in text


def test_small_samples_are_drawn_as_squares():
    """Of 8x8 pixels, in tiles of 64 with gaps of 16: a blurred picture looks better than what was sampled."""
    import numpy as np
    from PIL import Image

    with Image.open(CARDS / "ddpm-digits-8" / "lrlab" / "samples.png") as image:
        pixels = np.asarray(image.convert("L"))
    tiles = pixels[16:-16].reshape(-1, pixels.shape[1])[:64, 16:80]
    squares = tiles.reshape(8, 8, 8, 8)
    assert (squares == squares[:, :1, :, :1]).all()
    assert len(np.unique(tiles)) > 8


def test_the_citation_is_that_of_the_repository():
    from diffusers_lrlab.core.environment import citation, repository

    of_file = yaml.safe_load((printed.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    for value in (of_file["title"], of_file["authors"][0]["name"], of_file["license"]):
        assert f"{{{value}}}" in citation()
    assert of_file.get("repository-code") == repository()
