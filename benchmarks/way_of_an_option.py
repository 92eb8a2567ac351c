"""How far an option travels: the files and functions of diffusers_lrlab that a run with `--lr_scheduler cosine` enters,
those of them that are handed its value, and how often the run checks its options and asks its registries, before the first
`optimizer.step()` and in the whole run.

    OMP_NUM_THREADS=1 python benchmarks/way_of_an_option.py [--updates 20] [--lr_scheduler cosine]

Functions that imports call count; lambdas and the bodies of modules and classes do not.
"""

import importlib.util
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from common import make_parser, parse

PACKAGE = "diffusers_lrlab"
CHECK, LOOK_UP = ("core/options.py", "check_types"), ("core/registry.py", "Registry.__getitem__")


class Entered:
    """
    Calls of functions of the package, by file and name; `handed` are those with the user's `value` as an argument, and
    `looked_up` the names that registries were asked for.
    """

    def __init__(self, root, value):
        self.root, self.calls, self.looked_up = f"{root}{os.sep}", Counter(), Counter()
        self.value, self.handed = sys.intern(value), set()

    def __call__(self, frame, event, _):
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event != "call" or not is_function or not code.co_filename.startswith(self.root):
            return
        function = code.co_filename.removeprefix(self.root), code.co_qualname
        self.calls[function] += 1
        if function == LOOK_UP:
            self.looked_up[frame.f_locals.get("name")] += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for each in map(frame.f_locals.get, names):
            # Not the literals in the code, of a default or a registration: Python interns them.
            if isinstance(each, str) and each == self.value and each is not self.value:
                self.handed.add(function)

    def row(self):  # by the titles below
        files, files_handed = ({file for file, _ in functions} for functions in (self.calls, self.handed))
        looked_up = self.looked_up.total(), self.looked_up[self.value]
        counts = len(files), len(self.calls), len(files_handed), len(self.handed)
        return *counts, self.calls.total(), self.calls[CHECK], *looked_up


def measure(arguments, value):
    """The figures before the first step of an optimizer, and those of the whole run."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    root, before = Path(importlib.util.find_spec(PACKAGE).origin).parent, []  # of the package that runs
    entered = Entered(root, value)
    hook = register_optimizer_step_pre_hook(lambda *_: None if before else before.append(entered.row()))
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        from diffusers_lrlab.cli.main import main

        status = main(["train", *arguments])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        hook.remove()
    assert not status
    return before[0], entered.row()


def run():
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20, help="of the run")
    parser.add_argument("--lr_scheduler", default="cosine", help="the option's value")
    options = parse(parser, updates=2)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--max_train_steps={options.updates} --lr_scheduler={options.lr_scheduler} --output_dir={folder}/run"
        arguments = [*flags.split(), "--logger=none"]
        arguments += ["--dataset_name=dino", "--distance_samples=0", "--ddpm_num_steps=10"] if options.tiny else []
        rows = measure(arguments, options.lr_scheduler)
    titles = [
        "files of the package",
        "functions",
        f"files with functions that are handed `{options.lr_scheduler}`",
        "functions that are handed it",
        "calls of functions",
        "checks of all options",
        "names looked up in registries",
        f"of these, `{options.lr_scheduler}`",
    ]
    print("| entered | before the first `optimizer.step()` | in the whole run |", "|---|---|---|", sep="\n")
    for title, *figures in zip(titles, *rows, strict=True):
        print(f"| {title} | {' | '.join(f'{figure:,}' for figure in figures)} |")


if __name__ == "__main__":
    run()
