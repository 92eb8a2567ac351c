"""A schedule of the registry as source code for diffusers: its function, and its line in the documentation."""

import re
import textwrap
from dataclasses import replace
from typing import Any

from ..core.registry import Parameter
from ..schedules.registries import SCHEDULERS
from .bodies import BODIES, block

WIDTH = 119

# diffusers' words for ours, in this order.
_WORDS = {
    "updates": "steps",
    "update": "step",
    "warm-up": "warmup",
    "cool-down": "decay",
    "the optimizer's learning rate": "the initial lr",
    "the peak": "the initial lr",
    "the floor": "the minimum lr",
    "a floor": "a minimum lr",
}


def _in_host_words(text: str) -> str:
    for ours, theirs in _WORDS.items():
        text = re.sub(rf"\b{ours}\b", theirs, text)
    return text


def _paragraph(text: str, depth: int) -> str:
    """Filled lines, as diffusers' `doc-builder style` requires."""
    indent = "    " * depth
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def summary(name: str) -> str:
    return _in_host_words(SCHEDULERS[name].description)


def papers(name: str) -> list[str]:
    return [f"https://huggingface.co/papers/{number}" for number in re.findall(r"arXiv (\d+\.\d+)", SCHEDULERS[name].source)]


def references(name: str) -> str:
    return f"See {' and '.join(papers(name))}." if papers(name) else ""


def function_name(name: str) -> str:
    return f"get_{name}_schedule"


def _parameters(name: str) -> list[Parameter]:
    """The parameters in diffusers: the schedule's own without aliases, and the relative minimum."""
    entry, body = SCHEDULERS[name], BODIES[name]
    own = [replace(p, **body.changes.get(p.name, {})) for p in entry.parameters if p.same_as is None]
    (floor,) = (p for p in entry.common if p.name == "min_lr_ratio")
    return [*own, replace(floor, default=entry.facts.get("min_lr_ratio", 0.0))]


_FUNCTION = '''\
def {function}(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
{signature}    last_epoch: int = -1,
) -> LambdaLR:
    """
{summary}

    Args:
        optimizer ([`~torch.optim.Optimizer`]):
            The optimizer for which to schedule the learning rate.
        num_warmup_steps (`int`):
            The number of steps for the warmup phase.
        num_training_steps (`int`):
            The total number of training steps.
{arguments}        last_epoch (`int`, *optional*, defaults to -1):
            The index of the last epoch when resuming training.

{references}    Return:
        `torch.optim.lr_scheduler.LambdaLR` with the appropriate schedule.
    """
{setup}
    def lr_lambda(current_step: int):
        if current_step < num_warmup_steps:
            return {ramp}
{decay}
        return min_lr_ratio + (1.0 - min_lr_ratio) * decay

    return LambdaLR(optimizer, lr_lambda, last_epoch)
'''


def function_source(name: str) -> str:
    """The function of a schedule, from `def` to its last line."""
    body, start, ramp = BODIES[name], "0", "float(current_step) / float(max(1, num_warmup_steps))"
    if "warmup_from_floor" in SCHEDULERS[name].traits:
        start, ramp = "`min_lr_ratio` times the initial lr", f"min_lr_ratio + (1.0 - min_lr_ratio) * {ramp}"
    summary = (
        f"Create a schedule with a learning rate that {body.rate}, after a warmup period during which it increases linearly "
        f"from {start} to the initial lr set in the optimizer."
    )
    return _FUNCTION.format(
        function=function_name(name),
        signature="".join(map(_in_signature, _parameters(name))),
        summary=_paragraph(summary, 1),
        arguments="".join(map(_in_docstring, _parameters(name))),
        references=_paragraph(references(name), 1) + "\n\n" if references(name) else "",
        setup=block(body.setup, 1) + "\n" * bool(body.setup),
        ramp=ramp,
        decay=block(body.decay, 2),
    )


def _in_signature(parameter: Parameter) -> str:
    hint = parameter.kind.__name__ + " | None" * (parameter.default is None)
    return f"    {parameter.name}: {hint} = {literal(parameter.default)},\n"


def _in_docstring(parameter: Parameter) -> str:
    default = f", defaults to {_shown_default(parameter)}" if parameter.default is not None else ""
    head = f"        {parameter.name} (`{parameter.kind.__name__}`, *optional*{default}):"
    return f"{head}\n{_paragraph(_explained(parameter), 3)}\n"


def literal(value: Any) -> str:
    """The source code of a value, with double quotes."""
    return repr(value).replace("'", '"')


def _shown_default(parameter: Parameter) -> str:
    shown = literal(parameter.default)
    return f"`{shown}`" if parameter.kind is str else shown


def _explained(parameter: Parameter) -> str:
    what, _, derived = _in_host_words(parameter.help).partition("; derived: ")
    sentences = [what[0].upper() + what[1:], f"If not given: {derived}" if derived else ""]
    if parameter.choices is not None:
        sentences.append("One of " + ", ".join(f"`{literal(choice)}`" for choice in parameter.choices))
    elif parameter.range and "inf" not in parameter.range:
        sentences.append(f"Must be in {parameter.range}")
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def documentation(name: str) -> str:
    """A schedule's line in the training tutorial."""
    links = "".join(f", [paper]({link})" for link in papers(name))
    return f"- `{name}` (`{function_name(name)}`{links}): {summary(name)}"
