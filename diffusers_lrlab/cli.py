"""The `lrlab` command. A subcommand is a row of `COMMANDS`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .errors import LabError, did_you_mean
from .registry import Entry, Parameter, Registry

# Where each kind of thing that has a name is registered, and the option of the training script that takes the name.
KINDS = {
    "schedulers": ("schedules.catalogue", "SCHEDULERS", "--lr_scheduler"),
    "momentum": ("schedules.catalogue", "MOMENTUM_SCHEDULERS", "--momentum_scheduler"),
    "optimizers": ("optimizers", "OPTIMIZERS", "--optimizer"),
}


class Command(NamedTuple):
    """A subcommand: what it does in a line, its options, and the function that does it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LabError(f"{message}. See {self.prog} --help.")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _say_json(value: Any) -> None:
    _say(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


# --- list ------------------------------------------------------------------------------------------------------------


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}; all of them if not given")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    form.add_argument("--markdown", action="store_true", help="tables with all arguments, as in the README")


def _list(options: argparse.Namespace) -> None:
    if options.kind is not None and options.kind not in KINDS:
        raise LabError(
            f"There is no kind {options.kind!r} of things to list.{did_you_mean(options.kind, KINDS)} "
            f"Known: {', '.join(KINDS)}."
        )
    registries = {}
    for kind in [options.kind] if options.kind else KINDS:
        module, name, _ = KINDS[kind]
        registries[kind] = getattr(importlib.import_module(f".{module}", __package__), name)
    if options.json:
        _say_json({kind: _as_json(registry) for kind, registry in registries.items()})
    elif options.markdown:
        tables = [part for registry in registries.values() for part in (registry.table(), _common_table(registry)) if part]
        _say("\n\n".join(tables))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        _say("\n\n".join(_as_text(registry, KINDS[kind][2], width) for kind, registry in registries.items()))


def _common_table(registry: Registry) -> str:
    return registry.common_table() if registry.common else ""


def _aliases(registry: Registry, entry: Entry) -> list[str]:
    return [alias for alias, name in registry.aliases.items() if name == entry.name]


def _as_json(registry: Registry) -> list[dict[str, Any]]:
    def parameter(p: Parameter) -> dict[str, Any]:
        return {"name": p.name, "kind": p.kind.__name__, "default": p.default, "allowed": p.allowed, "help": p.help}

    return [
        {
            "name": entry.name,
            "aliases": _aliases(registry, entry),
            "description": entry.description,
            "source": entry.source,
            "parameters": [parameter(p) for p in entry.parameters],
            "common_parameters": [parameter(p) for p in entry.common],
            "traits": sorted(entry.traits),
            "facts": dict(entry.facts),
        }
        for entry in registry.values()
    ]


def _as_text(registry: Registry, flag: str, width: int | None) -> str:
    """Columns of names, aliases, descriptions and arguments: an entry a line, but for a terminal, where they wrap."""

    def argument(p: Parameter) -> str:
        return p.name if p.default is None else f"{p.name}={json.dumps(p.default)}"

    rows = [
        (entry.name, ", ".join(_aliases(registry, entry)), entry.description, ", ".join(map(argument, entry.parameters)))
        for entry in registry.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{registry.kind}s ({flag})"]
    for name, alias, description, arguments in rows:
        start = f"  {name:<{widths[0]}}  " + (f"{alias:<{widths[1]}}  " if widths[1] else "")
        if width is None:
            lines.append(f"{start}{description:<{widths[2]}}  {arguments}".rstrip())
            continue
        room = max(30, width - len(start))
        wrapped = textwrap.wrap(description, room) + textwrap.wrap(f"({arguments})", room) * bool(arguments)
        lines += [(start if index == 0 else " " * len(start)) + part for index, part in enumerate(wrapped)]
    if registry.common:
        lines.append(f"  Arguments of all, but for few: {', '.join(map(argument, registry.common))}")
    return "\n".join(lines)


# --- preview ---------------------------------------------------------------------------------------------------------


def number(text: str) -> float:
    """A whole number as `int`, another one as `float`."""
    return int(text) if text.strip().lstrip("+-").isdigit() else float(text)


def _preview_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lr_scheduler", action="append", metavar="NAME", help="name or spec string; several are drawn over each other")
    add("--lr_scheduler_kwargs", metavar="JSON", help="arguments of the schedule")
    add("--momentum_scheduler", metavar="NAME", help="name or spec string")
    add("--momentum_scheduler_kwargs", metavar="JSON", help="arguments of the momentum schedule")
    add("--num_training_steps", type=int, metavar="N", help="optimizer updates of the run")
    add("--num_warmup_steps", type=number, default=0, metavar="W", help="of them warm-up, or a fraction of the run below 1")
    add("--learning_rate", type=float, default=1e-4, metavar="LR", help="of the optimizer; default: %(default)s")
    add("--beta1", type=float, default=0.95, help="of the optimizer; default: %(default)s, as in the training script")
    add("--num_processes", type=int, default=1, metavar="n", help="with more than 1, and with")
    add("--gradient_accumulation_steps", type=int, default=1, metavar="g", help="more than 1, shows what diffusers' own "
        "train_unconditional.py would make of the schedule, too")  # fmt: skip
    add("--out", metavar="FILE.png", help="draws a picture (also .svg, .pdf) instead of a plot in the terminal")
    add("--json", action="store_true", help="prints the values at every update as JSON")
    add("--all", action="store_true", help="draws every schedule there is, side by side, into --out")


def _preview(options: argparse.Namespace) -> None:
    out = _picture_path(options.out)
    if options.all:
        _gallery(options, out)
        return
    if not options.lr_scheduler:
        raise LabError("Which schedule? Give --lr_scheduler NAME (`lrlab list schedulers` shows them), or --all.")
    if options.num_training_steps is None:
        raise LabError("How long is the run? Give --num_training_steps, its optimizer updates, such as 10000.")
    if options.lr_scheduler_kwargs and len(options.lr_scheduler) > 1:
        raise LabError(
            f"--lr_scheduler_kwargs {options.lr_scheduler_kwargs!r} is for one --lr_scheduler, and there are "
            f"{len(options.lr_scheduler)}. Use spec strings: --lr_scheduler step:gamma=0.5 --lr_scheduler rex:d=0.9."
        )
    if options.momentum_scheduler_kwargs and not options.momentum_scheduler:
        raise LabError("--momentum_scheduler_kwargs has no effect without --momentum_scheduler. Add that or leave it out.")
    from .preview import Run, preview

    run = Run(
        options.num_training_steps,
        options.num_warmup_steps,
        options.learning_rate,
        options.beta1,
        options.num_processes,
        options.gradient_accumulation_steps,
    )
    kwargs, momentum_kwargs = _json(options, "lr_scheduler_kwargs"), _json(options, "momentum_scheduler_kwargs")
    previews = [preview(spec, run, kwargs, options.momentum_scheduler, momentum_kwargs) for spec in options.lr_scheduler]
    if out:
        from .preview_plots import plot_previews

        plot_previews(previews, run, out)
    if options.json:
        asked_for_host = run.num_processes * run.accumulation > 1
        _say_json({"updates": run.num_updates, "schedules": [shown.as_json(asked_for_host) for shown in previews]})
    else:
        _say_previews(previews, run, out)


def _json(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    from .schedules.spec import parse_json_kwargs

    text = getattr(options, name)
    return None if text is None else parse_json_kwargs(text, f"--{name}")


def _picture_path(text: str | None) -> Path | None:
    """Where to draw, checked before the work is done."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise LabError(f"--out {text!r} is no picture's name; end it in .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise LabError(f"--out {text!r}: the folder {str(path.parent)!r} does not exist. Make it first, or choose another.")
    return path


def _gallery(options: argparse.Namespace, out: Path | None) -> None:
    if out is None:
        raise LabError("--all draws a picture and needs to know where: add --out FILE.png.")
    plain = vars(_parser().parse_args(["preview"]))
    for name, value in vars(options).items():
        if name not in ("all", "out") and value != plain[name]:
            raise LabError(f"--{name} has no effect beside --all, which shows every schedule as it is. Leave it out.")
    from .preview_plots import plot_gallery

    plot_gallery(out)
    _say(f"Wrote {out}.")


def _say_previews(previews: list[Any], run: Any, out: Path | None) -> None:
    from .preview import table
    from .terminal_plot import can_encode, terminal_plot

    if out is None:
        style: dict[str, Any] = {
            "width": min(100, shutil.get_terminal_size().columns),
            "unicode": can_encode(sys.stdout.encoding),
            "color": sys.stdout.isatty() and "NO_COLOR" not in os.environ,
        }
        courses = {shown.label: shown.course for shown in previews}
        courses |= {f"{shown.label}, diffusers' own script": shown.host for shown in previews if shown.host}
        _say(terminal_plot({label: course.lr for label, course in courses.items()}, _title(previews, run), **style) + "\n")
        momenta = {label: course.beta1 for label, course in courses.items() if course.beta1 is not None}
        if momenta:
            _say(terminal_plot(momenta, "beta1", height=6, **style) + "\n")
    _say(table(previews, run))
    for note in [note for shown in previews for note in shown.notes]:
        _say("\n" + note)
    if out is not None:
        _say(f"\nWrote {out}.")


def _title(previews: list[Any], run: Any) -> str:
    return "learning rate" + (f" of {previews[0].label}" if len(previews) == 1 else "") + f" over {run.num_updates} updates"


# --- upstream-patch --------------------------------------------------------------------------------------------------


def _upstream_patch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a schedule of `lrlab list schedulers`")
    parser.add_argument("--diffusers", required=True, metavar="CHECKOUT", help="a clone of the diffusers repository")
    parser.add_argument("--out", metavar="FILE.patch", help="where to write the patch")
    parser.add_argument("--branch", metavar="NAME", help="a branch to make for it in the clone")


def _upstream_patch(options: argparse.Namespace) -> None:
    from .upstream import upstream_patch

    _say(str(upstream_patch(options.name, options.diffusers, out=options.out, branch=options.branch)))


# --- all of them -----------------------------------------------------------------------------------------------------

COMMANDS = {
    "list": Command("shows what can be chosen by name", _list_arguments, _list),
    "preview": Command("draws schedules over a run", _preview_arguments, _preview),
    "upstream-patch": Command("makes a patch for diffusers of a schedule", _upstream_patch_arguments, _upstream_patch),
}


def _parser() -> _Parser:
    parser = _Parser(prog="lrlab", description="Training dynamics of diffusion models.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = f"{command.help[0].upper()}{command.help[1:]}."
        command.add_arguments(commands.add_parser(name, help=command.help, description=description, allow_abbrev=False))
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise LabError(
            f"Unknown command {arguments[0]!r}.{did_you_mean(arguments[0], COMMANDS)} Known: {', '.join(COMMANDS)}."
        )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [f"--{name}" for name in vars(options) if name != "command"]
        hint = did_you_mean(unknown[0].split("=")[0], flags)
        raise LabError(f"Unknown argument {unknown[0]!r}.{hint} See lrlab {options.command} --help.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; errors that the user can mend become one message and the exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets another one, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # `lrlab list | head`: nobody reads on, and Python must not find that out once more when it ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (LabError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
