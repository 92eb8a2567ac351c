"""The script that the launcher runs: where it draws timesteps and weighs losses, read from its text before it starts.

Hooks act only on calls that come from this file, and only where the text has a form that they know.
"""

import ast
import functools
import os
import re
import sys
from types import FrameType
from typing import Any

from ..core.errors import LabError

DENSITY, WEIGHTING, LOSS = "compute_density_for_timestep_sampling", "compute_loss_weighting_for_sd3", "mse_loss"
# (1 - s) * data + s * noise, and the other way round, as `ast.unparse` writes them.
_FLOW = re.compile(r"\(1(?:\.0)? - sigmas\) \* (\w+) \+ sigmas \* (\w+)")


class NotRecognised(LabError):
    """A hook found nothing to hook, or more than it understands."""


class HostScript:
    """A script by its path; the text is parsed once."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        try:
            with open(self.path, "rb") as file:
                self.tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError):
            self.tree = ast.parse("")  # running it says what is wrong

    def caller(self, calls: list[ast.Call]) -> FrameType | None:
        """The frame that called the hook which asks, if that is one of these calls of the script."""
        frame = sys._getframe(2)
        if frame.f_code.co_filename != self.path:
            return None
        return frame if any(call.lineno <= frame.f_lineno <= (call.end_lineno or 0) for call in calls) else None

    def calls(self, name: str) -> list[ast.Call]:
        """All calls of a function of this name, however it is reached (`mse_loss(...)`, `F.mse_loss(...)`)."""
        return self._calls.get(name, [])

    @functools.cached_property
    def _calls(self) -> dict[str | None, list[ast.Call]]:
        found: dict[str | None, list[ast.Call]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                found.setdefault(_last_name(node.func), []).append(node)
        return found

    @functools.cached_property
    def index_draws(self) -> list[ast.Call]:
        """Calls of `torch.randint(0, ....num_train_timesteps, (...,))`."""
        return [
            call
            for call in self.calls("randint")
            if len(call.args) == 3
            and _last_name(call.args[1]) == "num_train_timesteps"
            and isinstance(call.args[2], ast.Tuple)
            and len(call.args[2].elts) == 1
        ]

    @functools.cached_property
    def density_draws(self) -> list[ast.Call]:
        return self.calls(DENSITY)

    @functools.cached_property
    def indexes_a_table(self) -> bool:
        """Whether a density's numbers in [0, 1) become places in the scheduler's table of timesteps."""
        text = [ast.unparse(call) for call in self.calls("long")]
        return any(re.fullmatch(r"\(\w+ \* [\w.]+\.num_train_timesteps\)\.long\(\)", each) for each in text)

    @functools.cached_property
    def sigma_is_of_data(self) -> bool:
        """Whether the flow's sigma is the share of the data, so that the table begins with the least noise (Lumina 2)."""
        found = {match.groups() for node in ast.walk(self.tree) for match in _flows(node)}
        return any("noise" in data and "noise" not in noise for data, noise in found)

    @property
    def form(self) -> str:
        """How it draws timesteps: `"index"` or `"density"`; [`NotRecognised`] says why neither can be hooked."""
        if self.index_draws and self.density_draws:
            raise NotRecognised("it draws timesteps in two ways, " + _lines(self.index_draws + self.density_draws))
        if self.index_draws:
            return "index"
        if not self.density_draws:
            raise NotRecognised(f"it calls neither torch.randint(0, ....num_train_timesteps, (batch_size,)) nor {DENSITY}")
        if not self.indexes_a_table:
            raise NotRecognised(
                f"it takes the numbers of {DENSITY} for noise levels, not for places in a table of timesteps"
            )
        return "density"


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _flows(node: ast.AST) -> list[re.Match[str]]:
    if not isinstance(node, ast.BinOp):
        return []
    match = _FLOW.fullmatch(ast.unparse(node))
    return [match] if match else []


def _lines(calls: list[ast.Call]) -> str:
    return "in lines " + ", ".join(str(line) for line in sorted({call.lineno for call in calls}))


def find_scheduler(frame: FrameType, matches: Any) -> Any:
    """
    The noise scheduler among the variables that a call can see, for which `matches(scheduler)` is true.

    Copies of one scheduler (scripts of flow matching make one) are as good as each other.
    """
    from diffusers import SchedulerMixin

    values = [*frame.f_locals.values(), *frame.f_globals.values()]
    found = [value for value in values if isinstance(value, SchedulerMixin) and matches(value)]
    configs = {str(sorted(scheduler.config.items(), key=str)) for scheduler in found}
    if len(configs) != 1:
        names = ", ".join(sorted({type(scheduler).__name__ for scheduler in found})) or "none"
        raise NotRecognised(f"the noise scheduler that its timesteps belong to is not clear; found: {names}")
    return found[0]
