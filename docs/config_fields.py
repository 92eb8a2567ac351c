"""The fields of the configurations for the page of the Python API: type, default and meaning, from their declarations."""

import dataclasses
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from diffusers_lrlab.core.options import Option, options_of
from diffusers_lrlab.core.words import markdown_table
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.training.config import CONFIG_GROUPS, TrainingConfig

# The page of a registry, in place of its names.
PAGES = {
    "averaging.forms:EMA_FORMS": "averages.md",
    "data.toy2d:TOY_DATASETS": "toy-datasets.md",
    "models.registry:DENOISERS": "denoisers.md",
    "objective.noise:NOISES": "noises.md",
    "objective.process:OBJECTIVES": "objectives.md",
    "optimizers.entries:OPTIMIZERS": "optimizers.md",
    "schedules.registries:MOMENTUM_SCHEDULERS": "momentum.md",
    "schedules.registries:SCHEDULERS": "schedules.md",
    "timesteps.registries:LOSS_WEIGHTINGS": "weightings.md",
    "timesteps.registries:TIMESTEP_SAMPLERS": "timestep-samplers.md",
}


def field_tables(name: str) -> str:
    """The fields of an exported configuration under headings, grouped as in `--help`; "" for other names."""
    groups = {"TrainingConfig": CONFIG_GROUPS, "FinderConfig": (FinderConfig,)}.get(name, ())
    tables = []
    for group in groups:
        title = f"Fields of {name}" if len(groups) == 1 else f"{name}: {group._argument_group_name}"
        tables.append(f"### {title}\n\n<div class='rows fields' markdown>\n\n{_table(group)}\n\n</div>")
    return "\n\n".join(tables)


def _table(group: Any) -> str:
    hints = get_type_hints(group)
    rows = []
    for field in dataclasses.fields(group):
        known = options_of(group)[field.name]
        if not known.is_internal:
            kind = type_text(hints[field.name], field.default, known)
            rows.append((f"`{field.name}`", kind, f"`{field.default!r}`", " ".join(_meaning(known))))
    return markdown_table(("field", "type", "default", "what it is"), rows)


def type_text(hint: Any, default: Any, known: Option) -> str:
    """A type with its range, such as "`int` in [1, 1e9], or `None`"."""
    inner = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    may_be_none = NoneType in inner or default is None
    texts = [_one_type(each) for each in inner if each is not NoneType]
    text = ", or ".join(texts) + (f" in {known.range.text}" if known.range else "")
    return f"{text}, or `None`" if may_be_none else text


def _one_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f"`{value!r}`" for value in get_args(hint))
    return f"`{hint.__name__ if get_origin(hint) is None else str(hint).replace('typing.', '')}`"


def _meaning(known: Option) -> Iterator[str]:
    text = known.help.replace("|", r"\|").replace("<", "&lt;")
    if known.registry:
        page = PAGES.get(known.registry)
        names = ", ".join(known.entries)
        text = re.sub(r" Names: \{names\}\.", f" [Names]({page})." if page else f" Names: {names}.", text)
        text = text.replace("({names})", f"([names]({page}))")
    yield _as_arguments(text)
    if known.kinds:
        yield f"For {' and '.join(known.kinds)}."
    for need in known.needs:
        yield _as_arguments(f"{'Not with' if need.is_absence else 'Needs'} {need.text}.")


def _as_arguments(text: str) -> str:
    """The text with flags as names of fields."""
    fields = {**options_of(TrainingConfig), **options_of(FinderConfig)}

    def named(flag: re.Match[str]) -> str:
        if flag[1] in fields or flag[1].endswith("*"):
            return f"`{flag[1]}`"
        return f"`{flag[1].removeprefix('no_')}=False`" if flag[1].removeprefix("no_") in fields else flag[0]

    outside = re.split(r"(`[^`]*`)", text)  # what is in backticks is a command or a value
    return "".join(part if part.startswith("`") else re.sub(r"--(\w+\*?)", named, part) for part in outside)
