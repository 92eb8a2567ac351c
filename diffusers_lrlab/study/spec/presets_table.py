"""The studies that come with the package, for `lrlab study list` and the README."""

from ...core.registry import markdown_table
from ...core.words import counted
from .reading import load_spec, preset_names
from .spec import StudySpec


def num_runs(spec: StudySpec) -> int:
    """The runs that compare and those that tune, without extensions; counted, as to resolve them all takes seconds."""
    of_cell = len(spec.seeds) + (len(spec.tune.grid) * len(spec.tune.seeds) if spec.tune else 0)
    return len(spec.arms) * len(spec.datasets) * of_cell


def presets_table() -> str:
    specs = map(load_spec, preset_names())
    rows = [(f"`{spec.name}`", spec.title, str(num_runs(spec))) for spec in specs]
    return markdown_table(("preset", "what it is about", "runs"), rows)


def presets_text() -> str:
    specs = [load_spec(name) for name in preset_names()]
    width = max(len(spec.name) for spec in specs)
    return "\n".join(f"  {spec.name:<{width}}  {counted(num_runs(spec), 'run', '>4')}  {spec.title}" for spec in specs)
