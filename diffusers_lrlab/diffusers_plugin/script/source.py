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

from ...core.errors import LabError

DENSITY, WEIGHTING = "compute_density_for_timestep_sampling", "compute_loss_weighting_for_sd3"
LOSS, SCHEDULE = "mse_loss", "get_scheduler"
# (1 - s) * data + s * noise, and the other way round, as `ast.unparse` writes them.
_FLOW = re.compile(r"\(1(?:\.0)? - sigmas\) \* (\w+) \+ sigmas \* (\w+)")


_PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class NotRecognised(LabError):
    """A hook found nothing to hook, or more than it understands."""


class HostScript:
    """A script by its path; the text is parsed once."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        self.is_measured = False  # its functions are called for a held-out loss, which hooks leave alone
        try:
            with open(self.path, "rb") as file:
                self.tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError):
            self.tree = ast.parse("")  # running it says what is wrong

    def caller(self, calls: list[ast.Call]) -> FrameType | None:
        """The frame that called the hook which asks, perhaps through others, if it is one of these calls of the script."""
        if self.is_measured:
            return None
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_PLUGIN) and frame.f_back is not None:
            frame = frame.f_back
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
    def beside(self) -> list["HostScript"]:
        """The modules that it imports from its own folder, and those that they import from there: not run, but read."""
        folder, found, left = os.path.dirname(self.path), dict[str, HostScript](), [self]
        while left:
            for path in _imported(left.pop(), folder):
                if path != self.path and path not in found:
                    found[path] = HostScript(path)
                    left.append(found[path])
        return [*found.values()]

    @functools.cached_property
    def repeated_draws(self) -> list[ast.Call]:
        """Calls that use each timestep for several images: `torch.randint(...).repeat(2)`, of the draw or its variable."""
        drawn = {*self.index_draws}
        names = {
            ast.unparse(node.targets[0])
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and drawn & {*ast.walk(node.value)}
        }
        return [
            call
            for name in ("repeat", "repeat_interleave", "tile")
            for call in self.calls(name)
            if isinstance(call.func, ast.Attribute)
            and (drawn & {*ast.walk(call.func.value)} or _receiver(call.func) in names)
        ]

    @functools.cached_property
    def schedule_calls(self) -> list[ast.Call]:
        """Calls of diffusers' `get_scheduler`, and not of transformers' function of that name."""
        others = [
            alias
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
            for alias in node.names
            if alias.name == SCHEDULE
        ]
        return [] if others else self.calls(SCHEDULE)

    def _variable(self, call: ast.Call) -> str | None:
        """What the value of a call is assigned to."""
        assigned = (node for node in ast.walk(self.tree) if isinstance(node, ast.Assign) and node.value is call)
        return next((ast.unparse(node.targets[0]) for node in assigned), None)

    def is_prepared(self, call: ast.Call) -> bool:
        """Whether a schedule that is made by this call is given to accelerate; it is if that cannot be told."""
        name = self._variable(call)
        given = [
            argument for name in ("prepare", "prepare_scheduler") for made in self.calls(name) for argument in made.args
        ]
        return name is None or any(isinstance(each, ast.Starred) or ast.unparse(each) == name for each in given)

    def is_stepped_in_micro_batches(self, call: ast.Call) -> bool:
        """Whether it is stepped elsewhere than under `if accelerator.sync_gradients:` or `if (step + 1) % ... == 0:`."""
        name = self._variable(call)
        steps = [each for each in self.calls("step") if ast.unparse(each.func) == f"{name}.step"]
        tests = [node for node in ast.walk(self.tree) if isinstance(node, ast.If)]
        of_updates = [node for node in tests if re.search(r"sync_gradients|%.*accumulation", ast.unparse(node.test))]
        after_updates = {part for node in of_updates for statement in node.body for part in ast.walk(statement)}
        return any(each not in after_updates for each in steps)

    def assigns(self, name: str) -> bool:
        """Whether a variable of this name is written anywhere."""
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        return any(node.id == name for node in names)

    def values(self, name: str) -> list[str]:
        """What a variable of this name is ever assigned, as text."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Assign))
        return [ast.unparse(node.value) for node in found if name in map(ast.unparse, node.targets)]

    def mentions(self, name: str) -> bool:
        """Whether something has an attribute of this name."""
        return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(self.tree))

    @functools.cached_property
    def cached_by_step(self) -> list[str]:
        """Variables that a loop `for step, batch in enumerate(loader)` takes an element of for each batch, by `step`."""
        taken = []
        for loop in ast.walk(self.tree):
            if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) and _is_over_loader(loop.iter):
                step = ast.unparse(loop.target.elts[0])
                parts = [node for node in ast.walk(loop) if isinstance(node, ast.Subscript)]
                taken += [
                    part.value.id for part in parts if isinstance(part.value, ast.Name) and ast.unparse(part.slice) == step
                ]
        return sorted(set(taken))

    @functools.cached_property
    def row_counts(self) -> list[str]:
        """Attributes of data sets that take their rows modulo a number, as in `self.images[index % self.num_images]`."""
        parts = [node.right for node in ast.walk(self.tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)]
        return sorted({part.attr for part in parts if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"})

    @functools.cached_property
    def _epoch_loops(self) -> list[ast.For]:
        """From the epoch on at which a resume begins."""
        loops = (node for node in ast.walk(self.tree) if isinstance(node, ast.For))
        return [loop for loop in loops if "first_epoch" in ast.unparse(loop.iter)]

    @functools.cached_property
    def saves_within_epochs(self) -> bool:
        """Whether it saves its result, by `save_...`, within its loop over epochs, and nothing after it."""
        names = [name for name in self._calls if name and name.startswith("save_") and name != "save_state"]
        lines = [call.lineno for name in names for call in self.calls(name)]
        ends = [(loop.lineno, loop.end_lineno or 0) for loop in self._epoch_loops]
        return any(any(a < line <= b for line in lines) and all(line <= b for line in lines) for a, b in ends)

    @functools.cached_property
    def epoch_used_later(self) -> str | None:
        """The variable of its loop over epochs, if it is used after the loop: without an epoch it has no value."""
        used = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        names = [
            node.id
            for loop in self._epoch_loops
            for node in used
            if node.id == ast.unparse(loop.target) and node.lineno > (loop.end_lineno or 0)
        ]
        return names[0] if names else None

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
            both = self.index_draws + self.density_draws
            raise NotRecognised(f"it draws timesteps in two ways ({called_in(both)})")
        if self.index_draws:
            return "index"
        if not self.density_draws:
            raise NotRecognised(f"it calls neither torch.randint(0, ....num_train_timesteps, (batch_size,)) nor {DENSITY}")
        if not self.indexes_a_table:
            raise NotRecognised(
                f"it takes the numbers of {DENSITY} for noise levels, not for places in a table of timesteps"
            )
        return "density"


def _imported(script: HostScript, folder: str) -> list[str]:
    """Files in a folder, or in packages there, that a script's imports name."""
    paths = []
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            roots = [folder]
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, more))) for more in ("", *(alias.name for alias in node.names))]
            own = os.path.dirname(script.path)
            for _ in range(node.level - 1):
                own = os.path.dirname(own)
            roots = [own if node.level else folder]
        else:
            continue
        bases = [os.path.join(root, *name.split(".")) for root in roots for name in names if name]
        paths += [f"{base}.py" for base in bases] + [os.path.join(base, "__init__.py") for base in bases]
    return [path for path in dict.fromkeys(paths) if os.path.isfile(path)]


def _receiver(node: ast.expr) -> str:
    """What a chain of methods is called on: `x` of `x.long().repeat`."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _flows(node: ast.AST) -> list[re.Match[str]]:
    if not isinstance(node, ast.BinOp):
        return []
    match = _FLOW.fullmatch(ast.unparse(node))
    return [match] if match else []


def _is_over_loader(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith("enumerate(") and "loader" in text


def called_in(calls: list[ast.Call]) -> str:
    """`line 3`, or `lines 3, 7`."""
    lines = sorted({call.lineno for call in calls})
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"


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
