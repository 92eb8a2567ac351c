"""The command line of a third-party script, as its own argparse parses it: more schedules, and explained mistakes."""

import argparse
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ...core.errors import LabError
from ..script.source import HostScript
from .patches import Patches

_LR_OPTIONS = {"--lr_scheduler", "--lr-scheduler", "--lr_scheduler_type"}
_UNKNOWN = "unrecognized arguments: "


class _WiderChoices(list[Any]):
    """A script's choices of schedules, and all other names and spec strings."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or _fault(str(getattr(value, "value", value))) is None


def _fault(spec: str) -> LabError | None:
    from ...schedules.resolve import resolve_schedule

    try:
        resolve_schedule(spec)
    except LabError as error:
        return error
    return None


def follow_arguments(patches: Patches, script: HostScript, launcher_options: Iterable[str]) -> None:
    """
    Adds our schedules to the choices of options for schedules, and explains mistakes in the script's arguments.

    A script that gives its `--lr_scheduler` to diffusers would report a wrong name only once its models are loaded.
    """
    ours = {*launcher_options} - {"--local_rank", "--local-rank"}  # which is passed on to the script

    def add_wider_argument(add_argument: Any, container: Any, /, *flags: Any, **options: Any) -> Any:
        if _LR_OPTIONS & {*flags}:
            options = _widened(options, script)
        return add_argument(container, *flags, **options)

    def explain_order(error: Any, parser: argparse.ArgumentParser, message: str, /) -> Any:
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
        misplaced = [flag for flag in (word.partition("=")[0] for word in unknown) if flag in ours]
        if misplaced:
            message += f". Hint: options of the launcher ({', '.join(misplaced)}) go before the script's name."
        return error(parser, message)

    patches.wrap(argparse._ActionsContainer, "add_argument", add_wider_argument)
    patches.wrap(argparse.ArgumentParser, "error", explain_order)


def _widened(options: dict[str, Any], script: HostScript) -> dict[str, Any]:
    """What the script gives `add_argument`, changed so that the option takes our names and explains wrong ones."""
    from ...schedules.registries import SCHEDULERS

    choices = options.get("choices")
    own = [options.get("default"), *(script.texts if choices is None else choices)]  # a default may be a list
    if choices is not None:
        names = {str(getattr(choice, "value", choice)) for choice in choices}
        options = {**options, "choices": _WiderChoices([*choices, *(name for name in SCHEDULERS if name not in names)])}
    takes_text = options.get("type", str) is str and options.get("action", "store") == "store"
    if takes_text and (choices is not None or script.has_schedules_of_diffusers):
        options["type"] = _schedule(own)
    return options


def _schedule(own: Collection[Any]) -> Callable[[str], str]:
    """A type for argparse: a name or a spec string that `get_scheduler` takes, or one of the script's `own`."""

    def schedule(text: str) -> str:
        if text not in own and (fault := _fault(text)):
            raise argparse.ArgumentTypeError(str(fault))
        return text

    return schedule
