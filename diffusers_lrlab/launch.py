"""Runs any script, diffusers' own included, with the schedules of diffusers_lrlab.

    accelerate launch -m diffusers_lrlab.launch train_unconditional.py --lr_scheduler rex --dataset_name ...

The script is not changed. Its --lr_scheduler takes all our names and spec strings; our options come before its name.
"""

import argparse
import os
import sys
import traceback
import types
from typing import Any

import diffusers_lrlab

from .core.errors import Interrupted, LabError, is_first_process
from .core.options import TextParser
from .core.plugins import load_plugins, registered_failure
from .core.program import open_standard_streams, report_error
from .diffusers_plugin import hook_table
from .diffusers_plugin.host.patches import Patches
from .diffusers_plugin.host.source import HostScript


def follow_into_spawned_processes(patches: Patches) -> None:
    """
    Registers the schedules in worker processes too.

    A spawned process imports the script, not this package. But first it unpickles data about its parent, and one of our
    functions among them makes it import this package.
    """
    from multiprocessing import spawn

    def get_more(get_preparation_data: Any, name: str, /) -> dict[str, Any]:
        return {**get_preparation_data(name), "diffusers_lrlab": diffusers_lrlab.register}

    patches.wrap(spawn, "get_preparation_data", get_more)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise LabError(f"Cannot read the script {path!r}: {error.strerror}. Give its path, then its arguments.") from None


def run_script(path: str, arguments: list[str]) -> None:
    """
    Runs a script as `python path arguments` would: `__main__`, `__file__`, `sys.argv`, `sys.path` and tracebacks.

    These remain set afterwards, since the script's threads and exit handlers may use them.
    """
    source = _read(path)
    file_name = os.path.abspath(path)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file_name, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(file_name)
    exec(compile(source, file_name, "exec"), main.__dict__)


def explain_script(path: str) -> None:
    """Prints what our options would do in a script, without running it."""
    _read(path)
    if is_first_process():
        sys.stdout.write(f"{hook_table.explain(HostScript(path))}\n")


def _range_test(options: argparse.Namespace) -> Any:
    from .finder.find import ScriptTest

    return ScriptTest(options.optimizer, options.num_updates)


class _PassedOn(argparse.Action):
    """Keeps an option as it was spelt, with its value."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, f"{option_string}={values}")


def make_parser() -> TextParser:
    """The options of the hooks and of the launcher, and the script with its arguments."""
    parser = TextParser(
        prog="diffusers_lrlab.launch",
        usage="accelerate launch -m diffusers_lrlab.launch [options] SCRIPT.py [SCRIPT's own arguments]",
        description="Runs an unmodified script with the schedules of diffusers_lrlab, and audits its learning rate.",
        allow_abbrev=False,
    )
    hook_table.add_options(parser)
    add = parser.add_argument
    add("--strict", action="store_true", help="Stop with an error if one of these options cannot be used in the script.")
    explained = "Only print what each option would do in the script, and the faults of its schedule."
    add("--explain", action="store_true", help=explained)
    add("--import", dest="plugins", metavar="FILE_OR_MODULE", help="Python files or modules that register schedules.")
    local_rank = "Set by DeepSpeed's or torch's launcher; passed on to the script."
    add("--local_rank", "--local-rank", action=_PassedOn, metavar="N", help=local_rank)
    add("script", metavar="SCRIPT.py", help="The unmodified script.")
    add("arguments", nargs=argparse.REMAINDER, help="Its own arguments.")
    return parser


def main() -> None:
    """Runs the script that the command line names, and exits as it does."""
    open_standard_streams()
    parser = make_parser()
    try:
        options, unknown = parser.parse_known_args()
        parser.refuse(unknown, " before the script's name")
        if options.local_rank is not None:
            options.arguments = [options.local_rank, *options.arguments]
        hook_table.check_numbers(options)
        if options.explain:
            explain_script(options.script)
            return
        hook_table.check(options)
        _read(options.script)
        load_plugins(options.plugins)
    except LabError as error:
        sys.exit(report_error(error))
    with Patches() as patches:
        _launch(options, parser, patches)


def _launch(options: argparse.Namespace, parser: argparse.ArgumentParser, patches: Patches) -> None:
    follow_into_spawned_processes(patches)
    from .diffusers_plugin.hooks.find_lr import RangeTestDone
    from .diffusers_plugin.installed_hooks import Host

    host: Host | None = None
    try:
        test = _range_test(options) if options.find_lr else None
        host = Host(options, test, patches)
        host.run.follow_arguments(host.script, parser._option_string_actions)
        try:
            run_script(options.script, options.arguments)
        except RangeTestDone:
            pass
        except SystemExit as end:
            if (failure := registered_failure(end)) is not None:
                raise failure from end
            if end.code not in (None, 0):
                raise
        host.run.complete()
        host.check_used()
        if test is not None:
            test.finish(host.hooks["find_lr"])
        if host.exit_status:
            sys.exit(host.exit_status)
    except (LabError, Interrupted) as error:
        sys.exit(report_error(error))
    except (Exception, KeyboardInterrupt) as error:
        # The traceback starts at the script's first line, as if Python had been started with it.
        level = error.__traceback__
        while level is not None and level.tb_frame.f_code.co_filename != os.path.abspath(options.script):
            level = level.tb_next
        traceback.print_exception(error.with_traceback(level or error.__traceback__))
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        if host is not None and "find_lr" in host.hooks:
            host.hooks["find_lr"].remove()
        if host is not None and is_first_process() and (report := host.report()):
            sys.stderr.write(f"{report}\n")


if __name__ == "__main__":
    main()
