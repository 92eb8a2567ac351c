"""The Markdown of a report and of a card: the same sentences, tables and plots."""

from collections.abc import Iterable

from ...core.project import CITATION, install_command
from .contents import ReportContents
from .formats import Table, markdown_text, to_markdown
from .plot_list import DIFFERENCES, Plot


def report_markdown(contents: ReportContents, made: list[Plot]) -> str:
    """`report.md`, with links to the plots."""
    # A fence longer than any in the command.
    command = ["## Command", f"````sh\n{contents.study['command']}\n````"]
    return _joined([*_answers(contents, made), *_details(contents, made), *command, *_CITE])


def card_markdown(contents: ReportContents, made: list[Plot], name: str, command: str, own_data: Iterable[str] = ()) -> str:
    """
    The text of a card: what a reader needs first, how to load and repeat the study, then all tables and plots.

    Args:
        contents (`ReportContents`): The study.
        made (`list` of `Plot`): The plots in the folder of the card.
        name (`str`): That folder, from which the example loads until the card is uploaded.
        command (`str`): The command that repeats the study.
        own_data (iterable of `str`): Data of the study that the package does not have.
    """
    use = ["## Use", _example(name), _USE]
    repeat = ["## Repeat the study", f"````bash\n{install_command('study')}\n{command}\n````", _REPEAT]
    if names := ", ".join(map(markdown_text, own_data)):
        repeat += [f"It needs data that are not in this folder: {names}. `--dataset_name` names others."]
    return _joined([
        *_answers(contents, made), *use, *repeat, *_details(contents, made), *_CITE,
    ])  # fmt: skip


_CITE = ("## Citation", f"```bibtex\n{CITATION}\n```")
_USE = (
    "`summary.json` holds everything that this card says, `tables/` the tables in LaTeX. "
    "`diffusers_lrlab.read_study(FOLDER)` reads the runs as a data frame, and `lrlab study report` makes summary and "
    "tables again from `runs.parquet`, both in a copy of these files."
)
_REPEAT = (
    "No checkout of the project is needed. `spec.yaml` is the specification as it ran: `lrlab study run spec.yaml --out "
    "DIR` repeats the study even if the preset has changed since."
)


def _example(name: str) -> str:
    lines = [
        "from datasets import load_dataset", "",
        f'summary = load_dataset("{name}", split="summary")  # a row for each arm, data set and metric',
        f'runs = load_dataset("{name}", name="runs", split="runs")  # a row for each run',
    ]  # fmt: skip
    return "```python\n" + "\n".join(lines) + "\n```"


def _answers(contents: ReportContents, made: list[Plot]) -> list[str]:
    """Title, what the tests show, and how far that carries."""
    parts = [f"# {markdown_text(contents.study['title'])}", markdown_text(contents.introduction())]
    for index, (label, meaning, sentences, table) in enumerate(contents.conclusions()):
        parts += [f"## What the tests show: {markdown_text(label)}", markdown_text(meaning), _bullets(sentences)]
        parts += _folded(table) if table else []
        parts += [_image(plot) for plot in made if plot.file == DIFFERENCES and index == 0]
    parts += ["## Limitations", _bullets(contents.limitations)] if contents.limitations else []
    return parts + (["## Strength of the evidence", _bullets(contents.reach)] if contents.reach else [])


def _details(contents: ReportContents, made: list[Plot]) -> list[str]:
    """All tables and plots, versions and hardware."""
    parts = []
    for table in contents.all_tables():
        parts += [f"## {markdown_text(table.title)}", to_markdown(table)]
    if found := contents.findings_table():
        parts += _folded(found)
    for plot in made:
        if plot.file != DIFFERENCES:
            parts += [f"## {markdown_text(plot.title)}", _image(plot)]
    return [*parts, "## Versions and hardware", _bullets(f"{key}: {value}" for key, value in contents.facts())]


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {markdown_text(sentence)}" for sentence in sentences)


def _folded(table: Table) -> list[str]:
    return [f"<details><summary>{markdown_text(table.title)}</summary>", to_markdown(table), "</details>"]


def _image(plot: Plot) -> str:
    return f"![{markdown_text(plot.alt)}]({plot.file})"
