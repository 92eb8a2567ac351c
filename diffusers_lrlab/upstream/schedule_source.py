"""The computation of the schedule's length in a training script of diffusers, found in its syntax tree."""

import ast
from collections.abc import Iterable
from functools import cached_property

# The variables for lengths in accelerate's steps, by the argument of the schedule.
LENGTHS = {
    "num_warmup_steps": "num_warmup_steps_for_scheduler",
    "num_training_steps": "num_training_steps_for_scheduler",
    "total_num_steps": "num_training_steps_for_scheduler",  # of accelerate's DummyScheduler
}
UPDATES_PER_EPOCH, TOTAL = "num_update_steps_per_epoch", "args.max_train_steps"
# Variables that only the computation of the lengths sets; `overrode...` by scripts older than #8312.
COMPUTED = {
    "overrode_max_train_steps",
    "len_train_dataloader_after_sharding",
    UPDATES_PER_EPOCH,
    TOTAL,
    *LENGTHS.values(),
}


class NotPatched(Exception):
    """The reason why a script is not patched."""


class AlreadyRight(NotPatched):
    """The script needs no patch."""


def names_in(nodes: Iterable[ast.AST], context: type[ast.expr_context] | None = None) -> set[str]:
    """Names and dotted names, such as `args.max_train_steps`, that are loaded or stored below these nodes."""
    kinds = (ast.Name, ast.Attribute)
    found = {n for node in nodes for n in ast.walk(node) if isinstance(n, kinds)}
    inner = {n.value for n in found if isinstance(n, ast.Attribute)}
    return {ast.unparse(n) for n in found - inner if context is None or isinstance(n.ctx, context)}


def product(node: ast.expr) -> str:
    """An expression with its factors sorted, and `num_epochs` written as `num_train_epochs`."""
    factors = [node]
    while isinstance(factors[0], ast.BinOp) and isinstance(factors[0].op, ast.Mult):
        factors[:1] = [factors[0].left, factors[0].right]
    return " * ".join(sorted(ast.unparse(n).replace("args.num_epochs", "args.num_train_epochs") for n in factors))


def calls_of(node: ast.AST, name: str) -> list[ast.Call]:
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [call for call in found if ast.unparse(call.func).rpartition(".")[2] == name]


class ScheduleSource:
    """The statements by which a script computes the lengths of its schedule, and computes them again."""

    def __init__(self, text: str):
        self.lines = text.splitlines(keepends=True)
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise NotPatched(f"it is not valid Python (line {error.lineno})") from None
        found = [
            (function.body, position)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef)
            for position, statement in enumerate(function.body)
            if not isinstance(statement, ast.FunctionDef) and calls_of(statement, "get_scheduler")
        ]
        if not found:
            raise NotPatched("it makes its schedule without get_scheduler")
        if len(found) > 1:
            raise NotPatched(f"it makes {len(found)} schedules, whose optimizers alternate, which #8312 does not cover")
        self.body, self.position = found[0]
        self.schedule = self.body[self.position]

    @cached_property
    def before(self) -> list[ast.stmt]:
        """The statements just above the schedule that only compute lengths."""
        first = self.position
        while first and (stored := names_in([self.body[first - 1]], ast.Store)) and stored <= COMPUTED:
            first -= 1
        return self.body[first : self.position]

    @cached_property
    def given(self) -> list[ast.keyword]:
        """The length arguments of the schedule, and of its replacement under DeepSpeed."""
        found = [n for n in ast.walk(self.schedule) if isinstance(n, ast.keyword) and n.arg in LENGTHS]
        if len({keyword.arg for keyword in found} & {"num_warmup_steps", "num_training_steps"}) < 2:
            raise NotPatched("it does not name num_warmup_steps and num_training_steps where it makes its schedule")
        return found

    @cached_property
    def recount(self) -> int:
        """The index of the statement that counts the updates of an epoch again, after `accelerator.prepare`."""
        after = range(self.position + 1, len(self.body) - 1)
        prepared = next((n for n in after if calls_of(self.body[n], "prepare")), len(self.body))
        for n in range(prepared + 1, len(self.body) - 1):
            if names_in([self.body[n]], ast.Store) == {UPDATES_PER_EPOCH}:
                return n
        raise NotPatched(f"it does not count {UPDATES_PER_EPOCH} again after accelerator.prepare")

    @cached_property
    def names(self) -> set[str]:
        """The variables from which the lengths are computed."""
        return names_in([*self.before, self.body[self.recount], self.body[self.recount + 1], *self.given], ast.Load)

    @cached_property
    def lengths(self) -> str:
        return " ".join(ast.unparse(keyword.value) for keyword in self.given)

    @property
    def by_epochs_only(self) -> bool:
        return "args.num_epochs" in names_in(self.given) and TOTAL not in names_in([self.tree])

    @property
    def fault(self) -> str:
        if "gradient_accumulation_steps" in self.lengths:
            return "counts gradient accumulation, which accelerate's scheduler does not, and not the processes"
        if "num_processes" not in self.lengths:
            return "does not count the processes"
        if LENGTHS["num_training_steps"] in names_in([self.tree], ast.Store):
            return "is computed and not passed: without --max_train_steps it is a TypeError"
        return "is taken, by epochs, from the data loader before the processes share it"

    def assigned(self, name: str) -> set[str]:
        """All expressions that are assigned to a name."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
        return {product(n.value) for n in found}

    def comment_of(self, statement: ast.stmt) -> int:
        """The first line of the comment above a statement."""
        line = statement.lineno
        while line > 1 and self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
        return line

    def source(self, first: int, last: int | None) -> str:
        return "".join(self.lines[first - 1 : last])

    @property
    def lengths_source(self) -> str:
        return self.source(self.comment_of(self.before[0]), self.before[-1].end_lineno)

    def edited(self, *parts: tuple[int, int, str]) -> str:
        """The text with the donor's names for the lengths and with parts `(first line, last line, new text)` replaced."""
        lines = [*self.lines]
        for keyword in sorted(self.given, key=lambda keyword: keyword.col_offset, reverse=True):
            if keyword.end_lineno != keyword.lineno:
                raise NotPatched(f"line {keyword.lineno} has a length that spans several lines")
            old = lines[keyword.lineno - 1].encode()  # columns are counted in bytes
            new = f"{keyword.arg}={LENGTHS[keyword.arg or '']}".encode()
            lines[keyword.lineno - 1] = (old[: keyword.col_offset] + new + old[keyword.end_col_offset :]).decode()
        for first, last, text in sorted(parts, reverse=True):
            lines[first - 1 : last] = [text]
        return "".join(lines)
