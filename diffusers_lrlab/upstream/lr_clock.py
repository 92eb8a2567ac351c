"""
The length of the LR schedule in diffusers' training scripts, rewritten as in its merged pull request #8312.

The new code is copied from a script of the checkout that has it, the donor.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..core.errors import LabError
from .render import WIDTH
from .schedule_source import (
    COMPUTED,
    LENGTHS,
    TOTAL,
    UPDATES_PER_EPOCH,
    AlreadyRight,
    NotPatched,
    ScheduleSource,
    calls_of,
    names_in,
    product,
)

DONOR = "examples/text_to_image/train_text_to_image.py"


@dataclass(frozen=True)
class Patched:
    """A script's new text, and what was wrong with the old one."""

    text: str
    fault: str


def patched(text: str, donor_text: str) -> Patched:
    """A script's text with the donor's computation; raises [`NotPatched`] with the reason if that does not fit."""
    donor, script = _donor(donor_text), ScheduleSource(text)
    _refuse_split_batches(script)
    if _is_right(script, donor):
        raise AlreadyRight("its schedule is as long as its training")
    _refuse_other_names(script, donor.names)
    if script.schedule.col_offset != donor.schedule.col_offset:
        raise NotPatched("its schedule is not made at the top level of a function")
    if script.by_epochs_only:
        return Patched(_by_epochs(script, donor), script.fault)
    _refuse_other_statements(script)
    return Patched(_replaced(script, donor), script.fault)


def _donor(text: str) -> ScheduleSource:
    """The donor's computation; an error if the donor is older than #8312, or has changed since."""
    reason = "it does not compute the two lengths and warn where they change"
    try:
        donor = ScheduleSource(text)
        again = donor.body[donor.recount + 1]
        computed = all(donor.assigned(name) for name in LENGTHS.values())
        choices = [*donor.before[-1:], again, *(again.body[-1:] if isinstance(again, ast.If) else [])]
        if computed and len(choices) == 3 and all(isinstance(n, ast.If) for n in choices):
            return donor
    except NotPatched as error:
        reason = str(error)
    raise LabError(
        f"{DONOR} of this checkout does not follow #8312: {reason}. Use a commit near v0.42.1 as the base, or a newer "
        "diffusers_lrlab."
    )


def _refuse_split_batches(script: ScheduleSource) -> None:
    made = calls_of(script.tree, "Accelerator")
    if not any(keyword.arg == "split_batches" for call in made for keyword in call.keywords):
        return
    of_one = "it splits batches, so that accelerate steps the schedule once per update:"
    if "num_processes" in script.lengths or "_for_scheduler" in script.lengths:
        raise NotPatched(f"{of_one} its schedule is too long by the number of processes, also with #8312")
    raise AlreadyRight(f"{of_one} the lengths are right without the number of processes")


def _is_right(script: ScheduleSource, donor: ScheduleSource) -> bool:
    """Whether the schedule gets the donor's lengths, by the same names or by the same expressions."""
    for keyword in script.given:
        name, value = LENGTHS[keyword.arg or ""], product(keyword.value)
        if value == name:
            if not set() < script.assigned(name) <= donor.assigned(name):
                raise NotPatched(f"it computes {name} in its own way")
        # Without --max_train_steps such a script does not train at all.
        elif value not in donor.assigned(name) or (TOTAL in value and script.assigned(TOTAL)):
            return False
    return True


def _refuse_other_names(script: ScheduleSource, known: set[str]) -> None:
    known = known | COMPUTED | {"args.num_epochs"}
    again = [script.body[script.recount], script.body[script.recount + 1]] if names_in(script.given) <= known else []
    if unknown := sorted(names_in([*script.before, *again, *script.given], ast.Load) - known):
        raise NotPatched(f"it computes its lengths from {', '.join(unknown)}, which #8312 does not know")
    if "logger" not in names_in([script.tree], ast.Store):
        raise NotPatched("it has no logger, to which #8312 writes a warning")


def _refuse_other_statements(script: ScheduleSource) -> None:
    if not script.before:
        raise NotPatched("it does not compute lengths just above its schedule")
    again = script.body[script.recount + 1]
    if not isinstance(again, ast.If) or not names_in([again], ast.Store) <= COMPUTED:
        raise NotPatched(f"line {again.lineno} is not the `if` that computes {TOTAL} again")
    replaced = {id(n) for top in (*script.before, again, *script.given) for n in ast.walk(top)}
    # #8312 leaves it `None` until the second count.
    between = script.body[script.position : script.recount]
    used = [n for n in _outside(between, replaced) if ast.unparse(n) in (TOTAL, UPDATES_PER_EPOCH)]
    used += [n for n in _outside([script.tree], replaced) if ast.unparse(n) == "overrode_max_train_steps"]
    if used:
        raise NotPatched(f"it uses {ast.unparse(used[0])} in line {used[0].lineno}, which is no longer set there")


def _replaced(script: ScheduleSource, donor: ScheduleSource) -> str:
    again, of_donor = script.body[script.recount + 1], donor.body[donor.recount + 1]
    first = script.comment_of(script.before[0])
    # A comment that the donor does not have stays.
    if not {*script.lines[first - 1 : script.before[0].lineno - 1]} & {*donor.lines}:
        first = script.before[0].lineno
    return script.edited(
        (first, script.before[-1].end_lineno or 0, donor.lengths_source),
        (again.lineno, again.end_lineno or 0, donor.source(of_donor.lineno, of_donor.end_lineno)),
    )


def _by_epochs(script: ScheduleSource, donor: ScheduleSource) -> str:
    """The same without --max_train_steps: the donor's branch for epochs, with this script's names."""
    *head, choice = donor.before
    again = donor.body[donor.recount + 1]
    assert isinstance(choice, ast.If)  # checked by `_donor`
    assert isinstance(again, ast.If)
    warning = again.body[-1]
    lengths = [donor.source(donor.comment_of(donor.before[0]), head[-1].end_lineno)]
    lengths += [textwrap.dedent(donor.source(n.lineno, n.end_lineno)) for n in choice.body]
    total = ast.unparse(script.body[script.recount + 1]).partition(" = ")[0]
    if total != "max_train_steps":
        raise NotPatched(f"it does not set max_train_steps just below {UPDATES_PER_EPOCH}")
    indented = textwrap.indent("".join(textwrap.dedent(part) for part in lengths), "    ")
    indented = indented.replace("args.num_train_epochs", "args.num_epochs")
    checked = textwrap.indent(textwrap.dedent(donor.source(warning.lineno, warning.end_lineno)), "    ")
    above = script.comment_of(script.schedule)
    below = (script.body[script.recount + 1].end_lineno or 0) + 1
    return script.edited((above, above - 1, _joined(indented) + "\n"), (below, below - 1, checked.replace(TOTAL, total)))


def _outside(tops: Iterable[ast.AST], left_out: set[int]) -> Iterator[ast.Name | ast.Attribute]:
    for top in tops:
        for node in ast.walk(top):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in left_out:
                yield node


def _joined(text: str) -> str:
    """Drops parentheses around a line that fits without them, as diffusers' formatter does."""

    def join(match: re.Match[str]) -> str:
        line = f"{match[1]}{match[2]}\n"
        return line if len(line) <= WIDTH + 1 else match[0]

    return re.sub(r"^( *\w+ = )\(\n +(.*)\n +\)\n", join, text, flags=re.MULTILINE)
