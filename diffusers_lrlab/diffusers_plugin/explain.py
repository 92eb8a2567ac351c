"""`--explain`: what each option of the launcher acts on in a script, and the script's own faults, from its text alone."""

from collections.abc import Callable

from .hook_table import HOOKS
from .script.faults import find_faults
from .script.source import HostScript, NotRecognised


def recognisers() -> dict[str, Callable[[HostScript], str]]:
    """Functions that describe what an option acts on or raise [`NotRecognised`], by option."""
    return {entry.title: entry.recognise for entry in HOOKS.values() if entry.options}


def explain(script: HostScript) -> str:
    """A line for each option, and one for each fault."""
    width = max(map(len, recognisers()))
    lines = [script.path]
    for option, recognise in recognisers().items():
        try:
            found = recognise(script)
        except NotRecognised as reason:
            found = f"not here: {reason}"
        lines.append(f"  {option:<{width}}  {found}")
    faults = [f"  {fault.text}" for fault in find_faults(script)]
    return "\n".join([*lines, "By itself, this script", *(faults or ["  has no known fault"])])
