"""What the launcher replaces in other libraries is put back when a script ends, however it ends."""

import ast
import functools
import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from hosts import HAS_TRAINING
from launched_here import launch_here, restored_afterwards

from diffusers_lrlab import launch
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.registration import build_for_library

SCRIPTS = Path(__file__).parents[2] / "scripts"
LIBRARIES = ("torch", "accelerate", "diffusers", "transformers", "argparse", "multiprocessing", "diffusers_lrlab")
# Where hooks act, imported before they do.
NAMES = ("accelerate", "diffusers.optimization", "diffusers.training_utils", "multiprocessing.spawn", "transformers")
RUNS = {
    "none": ("ddpm", ()),
    "timesteps": ("ddpm", ("--timestep_sampler=clts", "--loss_weighting=min_snr", "--log_timesteps")),
    "flow": ("flow", ("--timestep_sampler=logit_normal", "--loss_weighting=min_snr")),
    "clock": ("ddpm", ("--optimizer=rmsprop", "--fix_lr_clock", "--strict_lr_audit", "--num_updates=6")),
    "ema": ("ema", ("--ema=constant",)),
    "find_lr": ("ddpm", ("--find_lr", "--num_updates=12")),
    "lr_scheduler": ("ddpm", ("--lr_scheduler=rex", "--num_updates=6")),
}


def is_function(value):
    """Not what libraries count or keep; without a question for `__class__`, at which torch warns of old names."""
    return callable(value) or type(value) in (classmethod, staticmethod, property)


def is_optimizer(owner):
    return isinstance(owner, type) and issubclass(owner, torch.optim.Optimizer) and owner.__module__.startswith("torch.")


def attributes():
    """The functions of these libraries' modules and classes, by owner and name, and diffusers' table of schedules."""
    modules = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    owners = [module for module in modules if module.__name__.partition(".")[0] in LIBRARIES]
    classes = {value for module in owners for value in vars(module).values() if issubclass(type(value), type)}
    owners += [each for each in classes if str(each.__module__).partition(".")[0] in LIBRARIES]
    found = {(owner, name): value for owner in owners for name, value in [*vars(owner).items()] if is_function(value)}
    # torch replaces these itself, when the first optimizer of a class is made.
    found = {key: value for key, value in found.items() if key[1] != "step" or not is_optimizer(key[0])}
    table = sys.modules["diffusers.optimization"].TYPE_TO_SCHEDULER_FUNCTION
    return found | {("TYPE_TO_SCHEDULER_FUNCTION", member): function for member, function in table.items()}


@pytest.fixture(scope="module")
def seen():
    for name in NAMES:
        importlib.import_module(name)
    return attributes()


def changed(before):
    """What is another function now, is gone, or is new in a class that was there."""
    after, classes = attributes(), {owner for owner, _ in before if isinstance(owner, type)}
    others = [key for key, value in before.items() if after.get(key) is not value]
    return others + [key for key in after.keys() - before.keys() if key[0] in classes]


def rows(folder):
    return json.loads((folder / "rows-0.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_replaced_attribute_is_put_back(seen, name, tmp_path):
    if name == "find_lr" and not HAS_TRAINING:
        pytest.skip("--find_lr needs diffusers_lrlab[train]")
    script, options = RUNS[name]
    assert launch_here(SCRIPTS / f"{script}_script.py", f"--output_dir={tmp_path}", options=options) == 0
    assert changed(seen) == []
    assert torch.optim.AdamW([torch.zeros(1)], lr=1.0).param_groups[0]["lr"] == 1.0  # made as ever


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [("RuntimeError", 1), ("KeyboardInterrupt", 130)])
def test_however_a_script_ends(seen, error, status, tmp_path):
    text = (SCRIPTS / "ddpm_script.py").read_text().replace("raise RuntimeError(", f"raise {error}(")
    (tmp_path / "script.py").write_text(text)
    options = (*RUNS["timesteps"][1], "--optimizer=rmsprop")
    assert launch_here(tmp_path / "script.py", f"--output_dir={tmp_path}", "--fail_at_end", options=options) == status
    assert changed(seen) == []


@pytest.mark.parametrize("options", [["--optimizer=none_such"], ["--ema=constant", "--strict"]])
def test_after_options_that_are_refused(seen, options, tmp_path):
    assert launch_here(SCRIPTS / "ddpm_script.py", f"--output_dir={tmp_path}", options=options) == 2
    assert changed(seen) == []


def test_without_options_nothing_changes(tmp_path):
    """To the bits that a script has without the launcher, also in a process where one ran with options before."""
    for name, options in (("bare", None), ("launched", ()), ("changed", RUNS["timesteps"][1]), ("after", ())):
        (tmp_path / name).mkdir()
        script, output = SCRIPTS / "ddpm_script.py", f"--output_dir={tmp_path / name}"
        if options is None:
            with restored_afterwards():
                launch.run_script(str(script), [output])
        else:
            assert launch_here(script, output, options=options) == 0
    assert rows(tmp_path / "bare") == rows(tmp_path / "launched") == rows(tmp_path / "after") != rows(tmp_path / "changed")


def test_specs_of_a_script_are_not_watched_after_it(tmp_path):
    from diffusers import optimization

    spec = "rex:d=0.8125"
    assert launch_here(SCRIPTS / "host_script.py", f"--output_dir={tmp_path}", f"--lr_scheduler={spec}") == 0
    function = optimization.TYPE_TO_SCHEDULER_FUNCTION[optimization.SchedulerType(spec)]
    assert isinstance(function, functools.partial)
    assert function.func is build_for_library


def test_no_keyword_of_a_caller_is_taken_for_a_parameter_of_a_wrap():
    """Functions around others name their parameters by position alone; of the recorder's, the others are named alike."""
    package, checked = Path(launch.__file__).parent, []
    for path in (package / "launch.py", *package.glob("diffusers_plugin/**/*.py"), package / "audit/recorder/__init__.py"):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wrap")]
        around = [call.args[2] for call in calls if len(call.args) > 2 and path.parent.name != "recorder"]
        around += [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "around"]
        names = {ast.unparse(each).rpartition(".")[2] for each in around}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names):
            given, is_method = function.args, function.args.posonlyargs[0].arg == "self"
            assert path.parent.name == "recorder" or not given.args + given.kwonlyargs, function.name
            assert len(given.posonlyargs) > is_method, function.name
            checked.append(function.name)
    assert len(checked) > 25


class Wrapped:
    def method(self, first, second=2, *more, **words):
        return first, second, more, words


def test_a_wrap_gets_named_parameters_by_position():
    def around(original, owner, given, /, *args, **kwargs):
        return original(owner, given, *args, **kwargs)

    words = {"original": 5, "owner": 6, "given": 7, "args": 8}
    inherits = type("Inherits", (Wrapped,), {})
    with Patches() as patches:
        patches.wrap(inherits, "method", around)
        assert inherits().method(1, 3, 4) == (1, 3, (4,), {})
        assert inherits().method(first=1, **words) == (1, 2, (), words)
    assert "method" not in vars(inherits)
