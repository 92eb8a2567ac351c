"""The statements of a training loop that compute a batch's loss, without backward pass, update and logging."""

import ast
from collections.abc import Iterable
from types import CodeType
from typing import Any, NamedTuple, TypeGuard, cast

from ...core.words import times
from .source import HostScript, NotRecognised, lines_of

# Functions and methods whose arguments are the size of their result.
_SIZED = {"repeat", "repeat_interleave", "expand", "tile", "zeros", "ones", "full", "randn", "rand"}
# Methods that change the object they are called on.
_MUTATING = {"append", "extend", "insert", "update", "pop"}
# Modules whose functions `name_` change their first argument, such as `torch.relu_(x)`.
_MODULES = {"torch", "nn", "F", "functional"}
# Methods of a tensor whose result shares its memory.
_VIEWS = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "narrow", "select", "detach"}
# Methods that must not run for a loss that is only measured.
_SIDE_EFFECTS = _MUTATING | {
    "backward",
    "step",
    "zero_grad",
    "log",
    "save_state",
    "clip_grad_norm_",
    "gather",
    "reduce",
    "write",
}
_JUMPS = ast.Continue | ast.Break | ast.Return | ast.Yield | ast.Global | ast.Delete


class LossCode(NamedTuple):
    """The part of a script's training loop that computes the loss of a batch."""

    loader_calls: list[ast.Call]  # which make the training loader
    first_line: int  # of the training loop
    last_line: int
    batch: str  # the variable of the loop that holds a batch
    # The variable that counts batches. It is undefined for `statements`, whose loss must depend on the batch alone.
    counter: str | None
    statements: CodeType  # compute the loss from the variables of the loop
    loss: CodeType  # the argument of `accelerator.backward`
    name: str  # of the file in tracebacks; line numbers are the script's
    sized_statement: ast.stmt | None  # makes `args.train_batch_size` rows of a tensor on which the loss depends


def find_loss_code(script: HostScript) -> LossCode:
    """Raises [`NotRecognised`] with the reason for a loop that cannot be understood."""
    backward = script.calls("backward")
    if len(backward) != 1:
        where = f" ({lines_of(backward)})" if backward else ""
        raise NotRecognised(f"it calls accelerator.backward {times(len(backward))}{where}, but only one call is supported")
    if len(backward[0].args) != 1:
        raise NotRecognised(f"its backward call is not accelerator.backward(loss) ({lines_of(backward)})")
    loaders = _loaders(script)
    loops = [loop for loop in script.nodes(ast.For) if _iterated(loop) in loaders and backward[0] in ast.walk(loop)]
    if len(loops) != 1:
        raise NotRecognised("its training loop does not iterate over a DataLoader(...) that it makes itself")
    loop, loss = loops[0], backward[0].args[0]
    batch, counter = _targets(loop)
    loader_calls = loaders[_iterated(loop)]
    if any(keyword.arg in ("sampler", "batch_sampler") for call in loader_calls for keyword in call.keywords):
        raise NotRecognised("its loader has a custom sampler, which covers all rows")
    before = _statements_before(loop.body, backward[0])
    statements = _needed(before, _loaded(loss))
    _check_effects(statements, batch)
    name = f"<loss of {script.path}>"  # not the script's path, so that hooks ignore its calls
    code = compile(ast.Module(statements, []), name, "exec"), compile(ast.Expression(loss), name, "eval")
    names = _loaded(loss).union(*map(_loaded, statements))
    _check_switches(before, names)
    sized = _sized_statement(script, statements, names)
    return LossCode(loader_calls, loop.lineno, loop.end_lineno or 0, batch, counter, *code, name, sized)


def _loaders(script: HostScript) -> dict[str | None, list[ast.Call]]:
    """Calls of `DataLoader(...)` by the variable that each is assigned to."""
    found: dict[str | None, list[ast.Call]] = {}
    calls = {*script.calls("DataLoader")}
    for node in script.nodes(ast.Assign):
        if node.value in calls and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _iterated(loop: ast.For) -> str | None:
    """The variable over which a loop iterates, with or without `enumerate`."""
    source = loop.iter
    if isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate" and source.args:
        source = source.args[0]
    return source.id if isinstance(source, ast.Name) else None


def _targets(loop: ast.For) -> tuple[str, str | None]:
    """The variables of a batch and of its index."""
    target: ast.expr = loop.target
    counter: str | None = None
    if isinstance(loop.iter, ast.Call) and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
        counter, target = target.elts[0].id, target.elts[1]
    if not isinstance(target, ast.Name):
        raise NotRecognised(f"its training loop unpacks its batches (line {loop.lineno})")
    return target.id, counter


def _statements_before(body: list[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """The statements before a call that is a statement of the loop, or of `with accelerator.accumulate(...)` in it."""
    for index, statement in enumerate(body):
        if call not in ast.walk(statement):
            continue
        if isinstance(statement, ast.Expr) and statement.value is call:
            return body[:index]
        if isinstance(statement, ast.With) and all("accumulate" in ast.unparse(item) for item in statement.items):
            return [*body[:index], *_statements_before(statement.body, call)]
        break
    where = f"accelerator.backward (line {call.lineno})"
    raise NotRecognised(f"{where} is not a statement of `with accelerator.accumulate(...)`")


def _needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The statements on which the values of these names depend."""
    kept: list[ast.stmt] = []
    in_loop = {name for statement in statements for name in _changed(statement)}
    for statement in reversed(statements):
        if (_changed(statement) | _receivers(statement, in_loop)) & names:
            kept.insert(0, statement)
            names = names | _loaded(statement)
    return kept


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _changed(statement: ast.stmt) -> set[str]:
    """The variables that a statement assigns, or whose items, attributes or values (`x.add_(1)`, `out=x`) it changes."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(_base(node))
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
        found |= {_base(part) for part in _written(node)}
    return found


def _expression_calls(statements: Iterable[ast.stmt]) -> list[ast.Call]:
    """Calls whose result is dropped, so that they are made for an effect."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def _receivers(statement: ast.stmt, in_loop: set[str]) -> set[str]:
    """The variables on which methods are called for their effect: any method for those of the loop, else `append` etc."""
    calls = _expression_calls([statement])
    filled = {_base(call.func) for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _MUTATING}
    return {_base(call.func) for call in calls} & in_loop | filled


def _base(node: Any) -> str:
    """The variable of a part or view: `x` of `x.y`, `x[0]` and `x.view(-1)`; empty if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript) or _is_method_call(node, _VIEWS):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_method_call(node: ast.AST, names: set[str]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def _written(node: ast.AST) -> list[ast.expr]:
    """The tensors that a call changes: `x.add_` of `x.add_(1)`, `x` of `torch.relu_(x)`, `inplace=True` and `out=x`."""
    if not isinstance(node, ast.Call):
        return []
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    out = given.get("out")
    found = [] if out is None else [*out.elts] if isinstance(out, ast.Tuple | ast.List) else [out]
    is_in_place = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
    if is_in_place and _base(node.func) not in _MODULES:
        return [*found, node.func]
    if is_in_place or isinstance(flag := given.get("inplace"), ast.Constant) and flag.value is True:
        found += node.args[:1]
    return found


# --- loops that are refused ------------------------------------------------------------------------------------------------


def _check_switches(statements: list[ast.stmt], names: set[str]) -> None:
    """Raises [`NotRecognised`] if part of the loss uses another model, as after `unwrap(unet).disable_adapters()`."""
    for call in _expression_calls(statements):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(receiver, ast.Call) and {_base(argument) for argument in receiver.args} & names:
            raise NotRecognised(f"it switches a model while computing its loss ({lines_of([call])}): {ast.unparse(call)}")


def _check_effects(statements: list[ast.stmt], batch: str) -> None:
    """Raises [`NotRecognised`] for jumps, for effects beyond the loss, and for a loss that depends on earlier batches."""
    assigned = {batch}
    node: Any
    for statement in statements:
        nodes = [*ast.walk(statement)]
        in_functions = {part for each in nodes if isinstance(each, ast.FunctionDef) for part in ast.walk(each)}
        stores = [(each.id, each.lineno) for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        for node in nodes:
            if node in in_functions:
                continue
            line = getattr(node, "lineno", statement.lineno)
            known = assigned | {name for name, where in stores if where < line}  # in a compound statement
            if isinstance(node, _JUMPS):
                raise NotRecognised(f"the code of its loss has jumps (line {line})")
            if _is_method_call(node, _SIDE_EFFECTS) and _base(node.func) not in known:
                effect = cast(ast.Attribute, node.func).attr
                raise NotRecognised(f"the code of its loss has a side effect ({effect}, line {line})")
            for part in _changed_parts(node):
                if _base(part) not in known | {""}:
                    raise NotRecognised(f"its loss depends on earlier batches ({ast.unparse(part)}, line {line})")
        assigned |= _changed(statement)


def _changed_parts(node: Any) -> list[ast.expr]:
    """The objects that a node changes in place: `x` of `x += 1`, `x.y` of `x.y = 1`, and [`_written`] ones."""
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node]
    return _written(node)


# --- batches of a fixed size -----------------------------------------------------------------------------------------------


def _sized_statement(script: HostScript, statements: list[ast.stmt], names: set[str]) -> ast.stmt | None:
    """A statement of the loss, or one that assigns its variables, that makes `train_batch_size` rows."""
    makers = {node.name for node in script.nodes(ast.FunctionDef) if _makes_batches(node)}
    assigning = [node for node in script.nodes(ast.Assign) if _changed(node) & names]
    for statement in (*assigning, *statements):
        called = {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
        if called & makers or _makes_batches(statement):
            return statement
    return None


def _makes_batches(node: ast.AST) -> bool:
    sizes = [size for call in ast.walk(node) if _is_method_call(call, _SIZED) for size in call.args]
    parts = [part for size in sizes for part in ast.walk(size)]
    return any(isinstance(part, ast.Attribute) and part.attr == "train_batch_size" for part in parts)
