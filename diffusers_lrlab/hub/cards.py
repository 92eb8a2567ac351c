"""Cards: filled from templates, and adapted when their folder is uploaded."""

import re
from pathlib import Path
from typing import Any

from ..core.errors import LabError
from ..core.plain_yaml import load_front_matter

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
    except Exception as error:  # of any type, from the YAML parser
        raise LabError(f"The metadata of {name!r} cannot be read: {error}") from None


def located_card(folder: Path, repo_id: str, revision: str) -> bytes:
    """The card of a folder, with examples that load from this branch of the repository, and there the source of results."""
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{str(path)!r} cannot be read ({error}); results are uploaded with their cards only.") from None
    branch = "" if revision == "main" else f', revision="{revision}"'
    loading = r'((?:Pipeline\.from_pretrained|\bload_dataset)\(\s*)"[^"\n]*"(, revision="[^"\n]*")?'
    text = re.sub(loading, rf'\1"{repo_id}"{branch}', text)
    card = parsed_card(re.sub(r'(custom_pipeline=)"[^"\n]*"', rf'\1"{repo_id}"', text), str(path))
    for result in card.data.eval_results or []:
        result.source_name, result.source_url = "lrlab/run.json", f"{HUB}/{repo_id}/blob/{revision}/lrlab/run.json"
    return str(card).encode()


def unfinished_card(record: dict[str, Any], repo_id: str, updates_done: int) -> bytes:
    """The card of a run that is not finished."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(library_name="diffusers", tags=["diffusers", "diffusers_lrlab", "unfinished"])
    title = repo_id.split("/")[-1]
    return fill("unfinished_card.md", data, title=title, record=record, updates_done=updates_done).encode()
