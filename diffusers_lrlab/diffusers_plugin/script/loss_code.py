"""The code of a script that computes the loss of a batch, cut out of its training loop: no backward, no update, no log."""

import ast
from types import CodeType
from typing import Any, NamedTuple, cast

from ...core.words import times
from .source import HostScript, NotRecognised, called_in

# Functions and methods that make a tensor of as many rows as they are told.
_OF_SIZE = {"repeat", "repeat_interleave", "expand", "tile", "zeros", "ones", "full", "randn", "rand"}
# Methods that change what they are called on.
_FILLING = {"append", "extend", "insert", "update", "pop"}
# Of functions that change their first argument, such as `torch.relu_(x)`.
_MODULES = {"torch", "nn", "F", "functional"}
# Methods of a tensor whose result shares its values.
_VIEWS = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "narrow", "select", "detach"}
# What must not happen again for a loss that is only looked at.
_SIDE_EFFECTS = {
    *_FILLING,
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


class LossCode(NamedTuple):
    """
    Attributes:
        loader_calls: Where the loader of the training is made.
        first_line, last_line: Of the training loop.
        batch: The variable that the loop puts each batch into.
        counter: The one that counts them in an epoch, if any: a loss that depends on it is not of the batch alone.
        statements: What computes the loss from the variables of the loop.
        loss: What is given to `accelerator.backward`.
        name: Of the code, in tracebacks; its lines are the script's.
        of_whole_batches: A statement that makes something for `args.train_batch_size` rows, which the loss follows from.
    """

    loader_calls: list[ast.Call]
    first_line: int
    last_line: int
    batch: str
    counter: str | None
    statements: CodeType
    loss: CodeType
    name: str
    of_whole_batches: ast.stmt | None


def find_loss_code(script: HostScript) -> LossCode:
    """[`NotRecognised`] where a loop is not of the form that is understood, with the reason."""
    backward = script.calls("backward")
    if len(backward) != 1:
        where = f" ({called_in(backward)})" if backward else ""
        raise NotRecognised(f"it calls accelerator.backward {times(len(backward))}{where}, where once is understood")
    if len(backward[0].args) != 1:
        raise NotRecognised(f"it calls backward in another way than accelerator.backward(loss) ({called_in(backward)})")
    loaders = _loaders(script.tree)
    loops = [node for node in ast.walk(script.tree) if isinstance(node, ast.For) and backward[0] in ast.walk(node)]
    loops = [loop for loop in loops if _iterated(loop) in loaders]
    if len(loops) != 1:
        raise NotRecognised("its training loop takes no batches from a DataLoader(...) that it makes itself")
    loop = loops[0]
    batch, index = _targets(loop)
    made = loaders[_iterated(loop)]
    if any(keyword.arg in ("sampler", "batch_sampler") for call in made for keyword in call.keywords):
        raise NotRecognised("its loader has a sampler of the script's own, which is made for all rows")
    before = _statements_before(loop.body, backward[0])
    loss = backward[0].args[0]
    statements = _needed(before, _loaded(loss))
    _check(statements, batch)
    # The name of another file: our hooks see the script's own calls only.
    name = f"<loss of {script.path}>"
    module = ast.Module(statements, [])
    code = compile(module, name, "exec"), compile(ast.Expression(loss), name, "eval")
    names = _loaded(loss).union(*map(_loaded, statements))
    _check_switches(before, names)
    fixed = _of_whole_batches(script.tree, statements, names)
    return LossCode(made, loop.lineno, loop.end_lineno or 0, batch, index, *code, name, fixed)


def _of_whole_batches(tree: ast.Module, statements: list[ast.stmt], names: set[str]) -> ast.stmt | None:
    """Among a loss's statements, and those that assign variables of its, be it by a function of the script."""
    makers = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _makes_whole_batches(node)}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _changed(node) & names]
    for statement in (*assigned, *statements):
        called = {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
        if called & makers or _makes_whole_batches(statement):
            return statement
    return None


def _makes_whole_batches(node: ast.AST) -> bool:
    """Whether it repeats or makes something by `train_batch_size`."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    made = [each for each in calls if cast(ast.Attribute, each.func).attr in _OF_SIZE]
    parts = [part for each in made for argument in each.args for part in ast.walk(argument)]
    return any(isinstance(part, ast.Attribute) and part.attr == "train_batch_size" for part in parts)


def _loaders(tree: ast.AST) -> dict[str | None, list[ast.Call]]:
    """Calls of `DataLoader(...)` by the variables that they are put into."""
    found: dict[str | None, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            if ast.unparse(node.value.func).split(".")[-1] == "DataLoader":
                found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _iterated(loop: ast.For) -> str | None:
    """The variable that a loop takes batches from, by `enumerate` or not."""
    source = loop.iter
    if isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate" and source.args:
        source = source.args[0]
    return source.id if isinstance(source, ast.Name) else None


def _targets(loop: ast.For) -> tuple[str, str | None]:
    target: ast.expr = loop.target
    index: str | None = None
    if isinstance(loop.iter, ast.Call) and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
        index, target = target.elts[0].id, target.elts[1]
    if not isinstance(target, ast.Name):
        raise NotRecognised(f"its training loop takes its batches apart (line {loop.lineno})")
    return target.id, index


def _statements_before(body: list[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """What is run before a call, which is to be a statement of the loop or of `with accelerator.accumulate(...)` in it."""
    for place, statement in enumerate(body):
        if call not in ast.walk(statement):
            continue
        if isinstance(statement, ast.Expr) and statement.value is call:
            return body[:place]
        if isinstance(statement, ast.With) and all("accumulate" in ast.unparse(item) for item in statement.items):
            return [*body[:place], *_statements_before(statement.body, call)]
        break
    raise NotRecognised(
        f"accelerator.backward (line {call.lineno}) is not a statement of `with accelerator.accumulate(...)`"
    )


def _needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The statements that the values of these names follow from: not what is logged, counted or shown."""
    kept: list[ast.stmt] = []
    of_loop = {name for statement in statements for name in _changed(statement)}
    for statement in reversed(statements):
        if (_changed(statement) | _called_on(statement, of_loop)) & names:
            kept.insert(0, statement)
            names = names | _loaded(statement)
    return kept


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _changed(statement: ast.stmt) -> set[str]:
    """The variables that a statement assigns, or whose items, attributes or (`x.add_(1)`, `out=x`) values it changes."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(_base(node))
        if isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
            found |= {node.name} if isinstance(node, ast.FunctionDef) else {name.asname or name.name for name in node.names}
        found |= {_base(part) for part in _written(node)}
    return found


def _called_on(statement: ast.stmt, of_loop: set[str]) -> set[str]:
    """The variables that a method is called on for its effect alone: any method of the loop's own, or `others.append`."""
    calls = [node.value for node in ast.walk(statement) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    filled = {_base(call.func) for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _FILLING}
    return {_base(call.func) for call in calls} & of_loop | filled


def _check_switches(statements: list[ast.stmt], names: set[str]) -> None:
    """Raises [`NotRecognised`] where a part of the loss is of another model, as after `unwrap(unet).disable_adapters()`."""
    calls = [
        node.value
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    for call in calls:
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(receiver, ast.Call) and {_base(argument) for argument in receiver.args} & names:
            raise NotRecognised(f"it switches a model while its loss is computed ({called_in([call])}): {ast.unparse(call)}")


def _base(node: Any) -> str:
    """The variable that a part or a view belongs to: `x` of `x.y`, `x[0]` and `x.view(-1)`."""
    while isinstance(node, ast.Attribute | ast.Subscript) or _is_view(node):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_view(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


def _check(statements: list[ast.stmt], batch: str) -> None:
    """Raises [`NotRecognised`] for what has effects beyond the loss, or goes on from the batch before."""
    assigned = {batch}
    node: Any
    for statement in statements:
        in_functions = {part for each in ast.walk(statement) if isinstance(each, ast.FunctionDef) for part in ast.walk(each)}
        for node in ast.walk(statement):
            if node in in_functions:
                continue
            line = f"line {getattr(node, 'lineno', statement.lineno)}"
            if isinstance(node, ast.Continue | ast.Break | ast.Return | ast.Yield | ast.Global | ast.Delete):
                raise NotRecognised(f"what its loss follows from does not run straight through ({line})")
            if _has_side_effect(node) and _base(node.func) not in assigned | _changed_before(statement, node):
                raise NotRecognised(f"what its loss follows from has an effect of its own ({node.func.attr}, {line})")
            for part in _changed_parts(node):
                if _base(part) not in assigned | _changed_before(statement, node) | {""}:
                    raise NotRecognised(f"its loss follows from the batch before ({ast.unparse(part)}, {line})")
        assigned |= _changed(statement)


def _changed_parts(node: Any) -> list[ast.expr]:
    """What is changed in its place: `x` of `x += 1`, `x.y = 1` itself, or what a call writes into."""
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node]
    return _written(node)


def _written(node: ast.AST) -> list[ast.expr]:
    """What a call writes into: `x.add_` of `x.add_(1)`, and `x` of `torch.relu_(x)`, `inplace=True` and `out=x`."""
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


def _has_side_effect(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SIDE_EFFECTS


def _changed_before(statement: ast.stmt, node: ast.AST) -> set[str]:
    """Names that are assigned in a compound statement before one of its parts."""
    names = (each for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return {each.id for each in names if each.lineno < getattr(node, "lineno", 0)}
