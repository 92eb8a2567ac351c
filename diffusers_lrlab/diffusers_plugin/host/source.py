"""A third-party script's text, parsed before it runs: where it draws timesteps, weights losses and makes its schedule.

Hooks act only on calls in this file, and only where the code has a known pattern. [`find_faults`] finds schedules of a wrong
length.
"""

import ast
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from ...core.errors import LabError

DENSITY, WEIGHTING = "compute_density_for_timestep_sampling", "compute_loss_weighting_for_sd3"
LOSS, SCHEDULE = "mse_loss", "get_scheduler"
# (1 - s) * data + s * noise, or with data and noise exchanged, as `ast.unparse` writes it.
_FLOW = re.compile(r"\(1(?:\.0)? - sigmas\) \* (\w+) \+ sigmas \* (\w+)")
_PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
Node = TypeVar("Node", bound=ast.AST)


class NotRecognised(LabError):
    """A hook found no code that it can act on, or code that it does not understand."""


class HostScript:
    """A third-party script and its syntax tree."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        try:
            with open(self.path, "rb") as file:
                self.tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError):
            self.tree = ast.parse("")  # running it reports the error

    # --- syntax -------------------------------------------------------------------------------------------------------

    def nodes(self, kind: type[Node]) -> list[Node]:
        """All nodes of a type in the syntax tree."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kind)]

    def calls(self, name: str) -> list[ast.Call]:
        """Calls of functions and methods of this name, such as `mse_loss(...)` and `F.mse_loss(...)`."""
        return self._calls.get(name, [])

    @functools.cached_property
    def _calls(self) -> dict[str | None, list[ast.Call]]:
        found: dict[str | None, list[ast.Call]] = {}
        for call in self.nodes(ast.Call):
            found.setdefault(_last_name(call.func), []).append(call)
        return found

    def calling(self, name: str) -> Callable[[], bool]:
        """A function that tells whether the script is at a call of this name, and has called the current hook."""
        return lambda: self.is_at(self.calls(name))

    def is_at(self, calls: list[ast.Call]) -> bool:
        """Whether the script is at one of these calls, and has called the current hook."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_PLUGIN) and frame.f_back is not None:
            frame = frame.f_back
        is_script = frame.f_code.co_filename == self.path
        return is_script and any(call.lineno <= frame.f_lineno <= (call.end_lineno or 0) for call in calls)

    def assigns(self, name: str) -> bool:
        """Whether a variable of this name is assigned anywhere."""
        return any(node.id == name and isinstance(node.ctx, ast.Store) for node in self.nodes(ast.Name))

    def mentions(self, name: str) -> bool:
        """Whether an attribute of this name is used anywhere."""
        return any(node.attr == name for node in self.nodes(ast.Attribute))

    # --- timesteps ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def sampling_pattern(self) -> str:
        """How it draws timesteps: `"index"` or `"density"`; raises [`NotRecognised`] for any other way."""
        if self.randint_calls and self.calls(DENSITY):
            raise NotRecognised(f"it draws timesteps in two ways ({lines_of(self.randint_calls + self.calls(DENSITY))})")
        if self.randint_calls:
            return "index"
        if not self.calls(DENSITY):
            raise NotRecognised(f"it calls neither torch.randint(0, ....num_train_timesteps, (batch_size,)) nor {DENSITY}")
        table_index = re.compile(r"\(\w+ \* [\w.]+\.num_train_timesteps\)\.long\(\)")
        if not any(table_index.fullmatch(ast.unparse(call)) for call in self.calls("long")):
            raise NotRecognised(f"it uses the values of {DENSITY} as noise levels, not as indices into a table of timesteps")
        return "density"

    @functools.cached_property
    def randint_calls(self) -> list[ast.Call]:
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
    def repeated_timesteps(self) -> list[ast.Call]:
        """Calls that use a timestep for several images, such as `torch.randint(...).repeat(2)`."""
        drawn = {*self.randint_calls}
        names = {ast.unparse(node.targets[0]) for node in self.nodes(ast.Assign) if drawn & {*ast.walk(node.value)}}
        return [
            call
            for name in ("repeat", "repeat_interleave", "tile")
            for call in self.calls(name)
            if isinstance(call.func, ast.Attribute)
            and (drawn & {*ast.walk(call.func.value)} or _receiver(call.func) in names)
        ]

    @functools.cached_property
    def sigma_scales_data(self) -> bool:
        """Whether sigma multiplies the data, not the noise, so that the table starts with the least noise (Lumina 2)."""
        flows = filter(None, (_FLOW.fullmatch(ast.unparse(node)) for node in self.nodes(ast.BinOp)))
        return any("noise" in flow[1] and "noise" not in flow[2] for flow in flows)

    # --- schedule, data and epochs ------------------------------------------------------------------------------------

    @functools.cached_property
    def schedule_calls(self) -> list[ast.Call]:
        """Calls of diffusers' `get_scheduler`, not of the function of that name in transformers."""
        imports = [node for node in self.nodes(ast.ImportFrom) if (node.module or "").startswith("transformers")]
        is_other = any(alias.name == SCHEDULE for node in imports for alias in node.names)
        return [] if is_other else self.calls(SCHEDULE)

    @functools.cached_property
    def has_schedules_of_diffusers(self) -> bool:
        """Whether the script itself imports `get_scheduler` from diffusers, so that it takes the names of its schedules."""
        imports = [node for node in self.nodes(ast.ImportFrom) if (node.module or "").split(".")[0] == "diffusers"]
        return any(alias.name == SCHEDULE for node in imports for alias in node.names)

    @functools.cached_property
    def texts(self) -> set[str]:
        """The string literals of the script, such as names of schedules that it handles itself."""
        return {node.value for node in self.nodes(ast.Constant) if isinstance(node.value, str)}


def _receiver(node: ast.expr) -> str:
    """The object of a chain of methods: `x` of `x.long().repeat`."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def lines_of(nodes: list[ast.Call]) -> str:
    """`"line 3"`, or `"lines 3, 7"`."""
    lines = sorted({node.lineno for node in nodes})
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"


# --- the length of its schedule ---------------------------------------------------------------------------------------


def find_faults(script: HostScript) -> list[tuple[str, str]]:
    """Of schedules that accelerate steps: a name for tables, and a sentence without a subject."""
    return [fault for call in script.schedule_calls if (fault := _schedule_fault(script, call)) is not None]


def _schedule_fault(script: HostScript, call: ast.Call) -> tuple[str, str] | None:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    warmup, length = (given.get(name, "") for name in ("num_warmup_steps", "num_training_steps"))
    variable = next((ast.unparse(node.targets[0]) for node in script.nodes(ast.Assign) if node.value is call), None)
    found = _length_fault(script, warmup, length) if _is_prepared(script, variable) else None
    if found is None:
        return None
    name, effect, *remedy = found
    text = f"makes its schedule {length} steps long ({lines_of([call])}): {effect}"
    return name, f"{text}. {remedy[0] if remedy else '--fix_lr_clock corrects it'}."


def _is_prepared(script: HostScript, schedule: str | None) -> bool:
    """Whether a schedule is passed to accelerate, which is assumed if the variable is unknown."""
    given = [argument for name in ("prepare", "prepare_scheduler") for call in script.calls(name) for argument in call.args]
    return schedule is None or any(isinstance(each, ast.Starred) or ast.unparse(each) == schedule for each in given)


def _length_fault(script: HostScript, warmup: str, length: str) -> tuple[str, ...] | None:
    """By accelerate, which steps a schedule once per process at each update, or once if it splits batches."""
    if "gradient_accumulation_steps" in warmup + length:
        return "LR: accumulation", "correct only without gradient accumulation and in one process"
    splits = any(keyword.arg == "split_batches" for made in script.calls("Accelerator") for keyword in made.keywords)
    if "num_training_steps_for_scheduler" in length:
        too_long = "too long by the number of processes, because it splits batches"
        return ("LR: processes", too_long) if splits else None
    if "num_processes" in length and script.assigns("num_training_steps_for_scheduler"):
        return "LR: epochs", "it computes the length by epochs but does not use it", "Give it --max_train_steps"
    if "num_processes" in length:
        return "LR: epochs", "by epochs, without --max_train_steps, too long by the number of processes"
    return ("LR: processes", "correct only in one process") if length and not splits else None
