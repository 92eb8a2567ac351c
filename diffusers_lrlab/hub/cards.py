"""Cards: filled from templates, and adapted when their folder is uploaded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.plain_yaml import load_front_matter
from ..core.project import CITATION, REPOSITORY, install_command
from ..study.same_command import command_of_card

HUB = "https://huggingface.co"


def fill(template: str, metadata: Any, **values: Any) -> str:
    """The text of a card, from a Jinja template of this folder. `metadata` is a `huggingface_hub.CardData`."""
    from huggingface_hub import RepoCard

    return str(RepoCard.from_template(metadata, template_path=str(Path(__file__).parent / template), **values))


def as_code(text: str) -> str:
    """Text of a third party as Markdown code, without what would end the code or the cell of a table."""
    return f"`{' '.join(re.sub('[`|]', ' ', text).split())}`"


def parsed_card(text: str, name: str) -> Any:
    """A `huggingface_hub.ModelCard`; raises a `LabError` for metadata that cannot be read."""
    from huggingface_hub import ModelCard

    try:
        load_front_matter(text)
        return ModelCard(text)
    except Exception as error:  # whatever the YAML parser raises
        raise LabError(f"The metadata of {name!r} cannot be read: {error}") from None


def _read(folder: Path) -> str:
    path = folder / "README.md"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{str(path)!r} cannot be read ({error}); results are uploaded with their cards only.") from None


def _with_location(text: str, repo_id: str, revision: str) -> str:
    """The card with examples that load from this branch of the repository."""
    branch = "" if revision == "main" else f', revision="{revision}"'
    loading = r'((?:Pipeline\.from_pretrained|\bload_dataset)\(\s*)"[^"\n]*"(, revision="[^"\n]*")?'
    text = re.sub(loading, rf'\1"{repo_id}"{branch}', text)
    return re.sub(r'(custom_pipeline=)"[^"\n]*"', rf'\1"{repo_id}"', text)


def card_for_run(folder: Path, record: dict[str, Any], repo_id: str, revision: str, updates_done: int) -> str:
    """The card of a run, with examples that load from the repository and the source of its results."""
    if record["run"]["status"] != "finished":
        from huggingface_hub import ModelCardData

        data = ModelCardData(library_name="diffusers", tags=["diffusers", "diffusers_lrlab", "unfinished"])
        title = repo_id.split("/")[-1]
        return fill("unfinished_card.md", data, title=title, record=record, updates_done=updates_done)
    card = parsed_card(_with_location(_read(folder), repo_id, revision), str(folder / "README.md"))
    for result in card.data.eval_results or []:
        result.source_name, result.source_url = "lrlab/run.json", f"{HUB}/{repo_id}/blob/{revision}/lrlab/run.json"
    return str(card)


def card_for_dataset(folder: Path, repo_id: str, revision: str) -> str:
    return _with_location(_read(folder), repo_id, revision)


def card_for_schedule(folder: Path, repo_id: str, revision: str) -> str:
    branch = "" if revision == "main" else f"@{revision}"
    text = re.sub(r'(lr_scheduler |get_scheduler\(")hub:[\w./-]+(@[\w./-]+)?', rf"\1hub:{repo_id}{branch}", _read(folder))
    return re.sub(r"`hub:[\w./-]+@REVISION`", f"`hub:{repo_id}@REVISION`", text)


def card_for_study(folder: Path, repo_id: str, revision: str) -> str:
    """The card of a study, uploaded as a dataset of its summary and its runs."""
    return str(parsed_card(_with_location(_read(folder), repo_id, revision), "README.md"))


_OF_A_STUDY = (
    "The report of a study made by diffusers_lrlab, as one page: `index.html`. Its summary is in `summary.json`, its\n"
    "specification in `spec.yaml`."
)


def space_card(
    title: str,
    about: str = _OF_A_STUDY,
    links: Mapping[str, str] | None = None,
    command: str = "",
    licence: str | None = None,
) -> str:
    """
    The card of a static Space that shows `index.html`: what it is `about`, addresses by text, its command and licence.
    """
    from huggingface_hub import SpaceCardData

    looks: dict[str, Any] = {"emoji": "📉", "colorFrom": "blue", "colorTo": "gray", "pinned": False}
    tags = ["diffusers_lrlab", "study"]
    data = SpaceCardData(title=title, sdk="static", app_file="index.html", license=licence, tags=tags, **looks)
    every = {**(links or {}), **({"The project": REPOSITORY} if REPOSITORY else {})}
    install = install_command("study")
    values = {"links": every, "command": command, "install": install, "citation": CITATION}
    return fill("space_card.md", data, title=title, about=about, **values)


def space_of_study(summary: Mapping[str, Any], repo_id: str, revision: str, is_preset: bool) -> str:
    """The card of a Space with the report of a study: links to the page and its data."""
    study, place = summary["study"], f"{HUB}/spaces/{repo_id}"
    files = {
        "Every number, as JSON": "summary.json", "The specification": "spec.yaml", "The curves": "curves.csv",
        "The value of each seed": "seeds.csv",
    }  # fmt: skip
    links = {"The report as a full page": place}
    links |= {text: f"{place}/blob/{revision}/{file}" for text, file in files.items()}
    command = command_of_card(str(study["command"]), str(study["name"]), is_preset)
    return space_card(str(study["title"]), links=links, command=command)
