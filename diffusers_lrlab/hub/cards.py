"""Cards as they are on the Hub: the one function that fills templates, and what changes when a folder goes there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import LabError

_TEMPLATES = Path(__file__).parent
HUB = "https://huggingface.co"


def fill(template: Path, metadata: Any, **values: Any) -> str:
    """
    A card.

    Args:
        template (`Path`): Markdown with Jinja's marks, beginning with the block of metadata.
        metadata (`huggingface_hub.CardData`): For that block.
        **values: For the marks.

    Returns:
        `str`: the text of a `README.md`.
    """
    from huggingface_hub import RepoCard

    return str(RepoCard.from_template(metadata, template_path=str(template), **values))


def _parsed(text: str, name: str) -> Any:
    """Metadata and text of a card, apart."""
    from huggingface_hub import ModelCard

    try:
        card = ModelCard(text)
    except ValueError as error:
        raise LabError(f"The metadata of {name!r} cannot be read: {error}") from None
    return card


def _read(folder: Path) -> str:
    path = folder / "README.md"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{str(path)!r} cannot be read ({error}); a result without its card is not uploaded.") from None


def _with_location(text: str, old: list[str], repo_id: str) -> str:
    """A card whose examples load from the repository; whatever else was written into it stays."""
    for location in old:
        text = text.replace(f'"{location}"', f'"{repo_id}"')
    return text


def card_for_run(folder: Path, record: dict[str, Any], repo_id: str) -> str:
    """
    The card of a run as it goes up: its examples load from the repository, and its results name their source.

    A run that is still going on has a card that says so.
    """
    config = record["config"]
    if record["run"]["status"] != "finished" and not (folder / "README.md").exists():
        from huggingface_hub import ModelCardData

        done, total = record["train"].get("updates_done"), record["train"]["num_updates"]
        return fill(
            _TEMPLATES / "unfinished_card.md",
            ModelCardData(library_name="diffusers", tags=["diffusers", "diffusers_lrlab", "unfinished"]),
            title=repo_id.split("/")[-1],
            status=record["run"]["status"],
            num_updates=total,
            updates_done=done,
            command=record["run"]["command"],
        )
    old = [str(location) for location in (config["hub_model_id"], config["output_dir"], folder) if location]
    card = _parsed(_with_location(_read(folder), old, repo_id), str(folder / "README.md"))
    for result in card.data.eval_results or []:
        result.source_name, result.source_url = "lrlab/run.json", f"{HUB}/{repo_id}/blob/main/lrlab/run.json"
    return str(card)


def card_for_dataset(folder: Path, repo_id: str) -> str:
    """The card of a set of points, whose example loads from the repository."""
    return _with_location(_read(folder), ["DIR"], repo_id)


def card_for_schedule(folder: Path, repo_id: str) -> str:
    """The card of a schedule, whose examples name the repository."""
    return re.sub(r"hub:USER/NAME\b", f"hub:{repo_id}", _read(folder))


def study_card(text: str, repo_id: str) -> str:
    """The card of a study as that of a data set: a row of its summary for each arm, data set and metric."""
    card = _parsed(text, "README.md")
    card.data.configs = [{"config_name": "default", "data_files": [{"split": "summary", "path": "summary.parquet"}]}]
    card.text = (
        card.text.rstrip()
        + f"""

## Use

```python
from datasets import load_dataset

summary = load_dataset("{repo_id}", split="summary")  # a row for each arm, data set and metric
```

`runs/` has a file for each run, `spec.yaml` what was asked for: `lrlab study run spec.yaml --out DIR` does it again.
"""
    )
    return str(card)


def space_card(title: str) -> str:
    """The metadata that makes a static Space of `index.html`."""
    from huggingface_hub import SpaceCardData

    looks: dict[str, Any] = {"emoji": "📉", "colorFrom": "blue", "colorTo": "gray", "pinned": False}
    data = SpaceCardData(title=title, sdk="static", app_file="index.html", tags=["diffusers_lrlab", "study"], **looks)
    return fill(_TEMPLATES / "space_card.md", data, title=title)
