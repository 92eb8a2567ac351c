"""Figures of README and docs/findings.md are those of the cards beside them, and the cards have what a reader needs."""

import importlib
import inspect
import json
import re
from types import SimpleNamespace

import printed
import tomllib
import yaml
from huggingface_hub import DatasetCardData, ModelCardData
from tables import cases

from diffusers_lrlab.core.environment import citation, repository

CARDS = printed.ROOT / "model_cards"
EVERY = sorted(path.name for path in CARDS.iterdir())
STUDIES = [name for name in EVERY if (CARDS / name / "summary.json").exists()]
MODELS = [name for name in EVERY if name not in STUDIES]
METRICS_OF_THE_HUB = {"accuracy", "mse"}  # of huggingface.co/metrics
README = (printed.ROOT / "README.md").read_text(encoding="utf-8")
_NUMBER = re.compile(r"(?<![\w.-])\d+\.\d+(?![\w.]*\d)")
_ELSEWHERE = {"0.0003", "0.1", "0.99", "0.98", "0.75"}  # of specifications


def read(name):
    """The metadata and the text of a card, and the titles of its sections."""
    _, front, text = (CARDS / name / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text, {*re.findall(r"^## (.*)$", text, flags=re.MULTILINE)}


def summary_of(card):
    return json.loads((CARDS / card / "summary.json").read_text(encoding="utf-8"))


# --- findings --------------------------------------------------------------------------------------------------------


def sections():
    """Pairs of the cards that a finding refers to and its text, without versions and links."""
    text = (printed.ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if cards := sorted(set(re.findall(r"model_cards/([\w-]+)/", section))):
            yield cards, re.sub(r"torch\s[\d.]+|arXiv [\d.]+|\(https:[^)]*\)", "", section.partition("\n")[2])


def numbers(value):
    """All numbers of a summary but p before it was adjusted."""
    if isinstance(value, dict):
        return [number for key, item in value.items() if key != "p" for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


def unknown(text, values):
    """The decimal numbers of a text that are no rounded value, nor one as a percentage."""
    known = [abs(factor * value) for value in values for factor in (1, 100)]
    found = [number for number in _NUMBER.findall(text) if number not in _ELSEWHERE]
    return [number for number in found if number not in {f"{value:.{len(number.split('.')[1])}f}" for value in known}]


@cases("cards, text", sections())
def test_every_figure_of_a_finding_is_in_its_cards(cards, text):
    """Loosely: it is a figure of them, if not that of its row."""
    of_paper = (CARDS / "lr-study-2d" / "tables" / "paper.tex").read_text(encoding="utf-8")
    assert unknown(text, [*numbers(list(map(summary_of, cards))), *map(float, _NUMBER.findall(of_paper))]) == []


# --- README ----------------------------------------------------------------------------------------------------------


def test_its_picture_is_there_with_a_text_and_for_dark_pages():
    (picture,) = re.findall(r"<picture>.*?</picture>", README, re.DOTALL)
    assert re.search(r'<img alt="[^"]{20,}"', picture)
    assert "(prefers-color-scheme: dark)" in picture
    assert all((printed.ROOT / path).is_file() for path in re.findall(r'(?:src|srcset)="([^"]+)"', picture))


def test_every_figure_has_its_command():
    """Each row of results leads to a card with that effect, and each link to a benchmark to a section with a command."""
    results = README.partition("## Results")[2].partition("\n## ")[0]
    rows = [line for line in results.splitlines() if line.startswith("| ") and "](model_cards/" in line]
    assert len(rows) > 6
    for row in rows:
        claims = summary_of(re.search(r"\]\(model_cards/([\w-]+)/README\.md\)", row)[1])["claims"]
        effects = [", ".join(f"`{each['dataset']}` {each['text']}" for each in claim["datasets"]) for claim in claims]
        assert row.split(" | ")[1] in effects, row
    benchmarks = (printed.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    blocks = re.split(r"^## ", benchmarks, flags=re.MULTILINE)
    with_command = {printed.anchor(block.partition("\n")[0]) for block in blocks if "```bash\n" in block}
    targets = set(re.findall(r"\]\(docs/benchmarks\.md#([\w-]+)\)", README))
    assert len(targets) > 2
    assert targets <= with_command


def test_the_repository_has_one_address(monkeypatch):
    """That of pyproject.toml: in what installs without a clone, in the citation, and in what the package knows."""
    project = tomllib.loads((printed.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    (command,) = set(re.findall(r'^pip install ".* @ git\+.*$', README, re.MULTILINE))
    assert re.findall(r"(?:git\+|-c )(\S+?)(?=\"|/raw/)", command) == [address or "REPOSITORY"] * 2
    of_file = yaml.safe_load((printed.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert of_file.get("repository-code") == address == repository()
    for value in (of_file["title"], of_file["authors"][0]["name"], of_file["license"]):
        assert f"{{{value}}}" in citation()
    known = {"Project-URL": ["Repository, https://example.org/a/b/", "Other, https://example.org"]}
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: SimpleNamespace(get_all=known.get))
    assert repository() == "https://example.org/a/b"


# --- cards -----------------------------------------------------------------------------------------------------------


@cases("name", EVERY)
def test_a_card_names_no_machine_and_needs_no_checkout(name):
    metadata, text, heads = read(name)
    kind = DatasetCardData if name in STUDIES else ModelCardData
    assert {*metadata} <= {*inspect.signature(kind.__init__).parameters, "configs", "model-index", "tags"}
    assert metadata["license"] == "apache-2.0"
    assert re.findall(r"(?:/root|/home|/tmp|/work|/mnt|[A-Z]:\\)[\w/]*", text) == []
    assert "training_scripts" not in text
    (block,) = re.findall(r"^`{3,}bash\n(.*?)^`{3,}$", text, flags=re.DOTALL | re.MULTILINE)
    install, command = block.strip().splitlines()
    assert install.startswith("pip install")
    assert command.startswith(("lrlab ", "accelerate launch -m diffusers_lrlab"))
    assert "Citation" in heads
    shown = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    assert [file for alt, file in shown if not alt or not (CARDS / name / file).is_file()] == []


@cases("name", STUDIES)
def test_the_card_of_a_study_has_what_the_viewer_and_its_readers_need(name):
    metadata, text, heads = read(name)
    summary = summary_of(name)
    assert metadata["pretty_name"] == summary["study"]["title"]
    files = [data["path"] for config in metadata["configs"] for data in config["data_files"]]
    assert files == [file for file in ("summary.parquet", "runs.parquet") if (CARDS / name / file).exists()]
    sources = {claim["source"] for claim in summary.get("claims", ())}
    papers = {source.removeprefix("arXiv ") for source in sources if source.startswith("arXiv ")}
    assert {tag.removeprefix("arxiv:") for tag in metadata["tags"] if tag.startswith("arxiv:")} == papers
    assert all(f"](https://arxiv.org/abs/{number})" in text for number in papers)
    assert f'load_dataset("{name}"' in text
    tested = {"Strength of the evidence"} if len(summary["study"]["seeds"]) > 1 else set()
    assert {"Use", "Repeat the study", "Cost", "Versions and hardware"} | tested <= heads
    assert re.search(rf"--out {re.escape(summary['study']['name'])}\s", text)
    assert {file for _, file in re.findall(r"!\[(.*?)\]\((.*?)\)", text)} == {
        path.name for path in (CARDS / name).glob("*.png")
    }


@cases("name", MODELS)
def test_the_card_of_a_model_is_what_the_program_writes_from_its_files(name):
    with printed.docs_modules():
        text = importlib.import_module("cards").text_of(CARDS / name)
    assert text == (CARDS / name / "README.md").read_text(encoding="utf-8"), f"{name} is out of date: python docs/cards.py"
    metadata, _, heads = read(name)
    declared = [metric for result in metadata["model-index"][0]["results"] for metric in result["metrics"]]
    assert {metric["type"] for metric in declared} | {*metadata["metrics"]} <= METRICS_OF_THE_HUB
    assert {"Use", "Results", "Data and licence", "Limits", "How it was made"} <= heads
    results = json.loads((CARDS / name / "lrlab" / "run.json").read_text())["train"]["results"]
    for key in ("frechet_distance", "frechet_distance_of_training_images"):
        assert f"| {results[key]:.4g} |" in text
