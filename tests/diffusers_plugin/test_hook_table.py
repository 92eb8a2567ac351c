"""A hook of the launcher is one file and one row: here it is made up, and all of the launcher knows it."""

import sys
from pathlib import Path

import pytest
import torch
from launched_here import launch_here

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.extras import EXTRAS
from diffusers_lrlab.core.ranges import Range
from diffusers_lrlab.diffusers_plugin import hook_options
from diffusers_lrlab.diffusers_plugin.explain import explain
from diffusers_lrlab.diffusers_plugin.hook_table import HOOKS, HookEntry, HookOption
from diffusers_lrlab.diffusers_plugin.host.patches import Patches
from diffusers_lrlab.diffusers_plugin.installed_hooks import InstalledHooks
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised
from diffusers_lrlab.launch import main, make_parser

SCRIPTS = Path(__file__).parents[1] / "scripts"
ASKED = "--count_updates cannot be used in this script: "


class CountingHook:
    """Counts updates, and numbers that are drawn by `torch.rand`."""

    def __init__(self, run, first):
        self.run, self.num_seen, self.num_drawn = run, first, 0

    def install(self):
        self.run.on_update.append(self.count)
        self.run.patches.wrap(torch, "rand", self.draw)

    def count(self):
        self.num_seen += 1

    def draw(self, rand, *args, **kwargs):
        self.num_drawn += 1
        return rand(*args, **kwargs)

    def report(self):
        return f"--count_updates: {self.num_seen} updates, and numbers drawn: {self.num_drawn > 0}."


def recognise(script):
    if not script.calls("backward"):
        raise NotRecognised("it calls no backward")
    return "its updates are counted"


def make(host):
    recognise(host.script)
    return CountingHook(host.run, host.options.count_from or 0)


def row(acts=False, **more):
    option = HookOption(name="count_updates", value_type=bool, help="Count the updates.", acts_in_range_test=acts)
    setting = HookOption(
        name="count_from", value_type=int, metavar="N", range=Range("[1, 9]", whole=True), help="Begin with this number."
    )
    return HookEntry(module=sys.modules[__name__], options=(option,), settings=(setting,), **more)


@pytest.fixture
def register(monkeypatch):
    return lambda **more: monkeypatch.setitem(HOOKS, "counting", row(**more))


def options_of(*words, script="ddpm"):
    return make_parser().parse_args([*words, str(SCRIPTS / f"{script}_script.py")])


def made(options, range_test=None):
    with Patches() as patches:
        return InstalledHooks(options, range_test, patches).made


def test_its_option_is_in_help_and_explained(register, tmp_path):
    register()
    assert "--count_from N" in make_parser().format_help()
    assert "Count the updates." in make_parser().format_help()
    assert "--count_updates " in (told := explain(HostScript(str(SCRIPTS / "ddpm_script.py"))))
    assert "its updates are counted" in told
    (tmp_path / "script.py").write_text("print()")
    assert "not here: it calls no backward\n" in explain(HostScript(str(tmp_path / "script.py")))


def test_it_is_in_the_table_of_its_page(register):
    before = hook_options.options_table()
    register()
    new = {*hook_options.options_table().splitlines()} - {*before.splitlines()}
    assert new == {"| `--count_updates` | Count the updates. | – |", "| `--count_from N` | Begin with this number. | – |"}


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (["--count_from=2"], {}, "--count_from 2 has no effect without --count_updates. Add it, or remove --count_from."),
        (
            ["--count_updates", "--count_from=10"],
            {},
            "--count_from 10: must be a whole number in .1, 9., got 10. Hint: Begin with this",
        ),
        (
            ["--count_updates"],
            {"extra": "none"},
            "--count_updates needs no_such_package, not installed here",
        ),
        (["--strict"], {}, "--strict has no effect without one of .*, --find_lr, --count_updates. Add one"),
    ],
    ids=["setting_alone", "out_of_range", "missing_package", "strict_alone"],
)
def test_what_has_no_effect_is_refused(register, words, more, message, monkeypatch):
    monkeypatch.setitem(EXTRAS, "none", {"no_such_package": "1"})
    register(**more)
    with pytest.raises(LabError, match=message):
        hook_options.check(options_of(*words))


def test_explaining_looks_at_numbers_too(tmp_path, capsys, monkeypatch):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr("sys.argv", ["launch", "--explain", "--num_updates", "0", str(tmp_path / "script.py")])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, "--num_updates 0: must be a whole number" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("name", ["timestep_sampler", "ema", "optimizer"])
def test_an_empty_value_is_not_left_out(name):
    options = options_of(f"--{name}=")
    assert [entry for entry in HOOKS.values() if entry.is_asked(options) and not entry.is_always_there]


def test_an_option_is_given_once(capsys):
    with pytest.raises(SystemExit):
        options_of("--ema=constant", "--ema", "warmup_power")
    error = "--ema warmup_power: must be given once, got constant before. Hint: leave one out."
    assert error in capsys.readouterr().err


def test_it_is_used_and_put_back(register, tmp_path, capsys):
    register()
    rand = torch.rand
    options = ("--count_updates", "--count_from=1", "--strict")
    assert launch_here(SCRIPTS / "ddpm_script.py", f"--output_dir={tmp_path}", options=options) == 0
    assert "diffusers_lrlab: --count_updates: 7 updates, and numbers drawn: True.\n" in capsys.readouterr().err
    assert torch.rand is rand


def test_it_is_not_made_where_what_it_needs_is_not_recognised(register, capsys):
    """In a script that draws no timesteps."""
    register(needs=("timesteps",))
    assert {"timesteps", "counting"} <= made(options_of("--count_updates")).keys()
    assert made(options_of("--count_updates", script="ema")).keys() == {"clock", "updates"}
    assert f"{ASKED}it calls neither torch.randint" in capsys.readouterr().err.replace("diffusers_lrlab: ", "")
    with pytest.raises(LabError, match=r"\(--strict\)"):
        made(options_of("--count_updates", "--strict", script="ema"))


def test_what_needs_each_other_is_used_together_or_not_at_all(register):
    register(needs=("ema",))
    options = options_of("--timestep_sampler=clts", "--count_updates", "--ema=constant", "--log_timesteps")
    of_timesteps = ["timesteps", "weighting", "losses", "log"]
    assert hook_options.requested_groups(options) == [["clock"], ["updates"], of_timesteps, ["ema", "counting"]]
    register(needs=("log", "ema"))
    assert hook_options.requested_groups(options) == [["clock"], ["updates"], [*of_timesteps, "ema", "counting"]]


def test_a_sampler_that_needs_weights_is_left_alone_without_them(tmp_path, capsys):
    """Two losses of a timestep, as of a preference, cannot be weighted."""
    spec = "--timestep_sampler=logit_normal:unbiased=true"
    assert {"timesteps", "weighting"} <= made(options_of(spec)).keys()
    assert "weighting" not in made(options_of("--timestep_sampler=logit_normal"))
    draw = "torch.randint(0, scheduler.config.num_train_timesteps, (size,)).repeat(2)"
    (tmp_path / "script.py").write_text(f"timesteps = {draw}\nF.mse_loss(a, b)\n")
    assert made(make_parser().parse_args([spec, str(tmp_path / "script.py")])).keys() == {"clock", "updates"}
    assert "--timestep_sampler cannot be used in this script: it uses each timestep" in capsys.readouterr().err


@pytest.mark.parametrize("acts", [False, True])
def test_it_is_idle_in_a_range_test_unless_it_acts_there(register, capsys, acts):
    from diffusers_lrlab.finder.find import ScriptTest

    register(acts=acts)
    hooks = made(options_of("--find_lr", "--count_updates", "--count_from=2"), ScriptTest())
    assert ("counting" in hooks) == acts
    assert "find_lr" in hooks
    named = "--count_from" if acts else "--count_updates, --count_from"
    assert f"--find_lr does not train: {named} has no effect on the test." in capsys.readouterr().err


@pytest.mark.parametrize("name", HOOKS)
def test_every_row(name):
    """Its functions exist, needs are earlier rows, and options that request others are known."""
    entry, earlier = HOOKS[name], [*HOOKS][: [*HOOKS].index(name)]
    assert callable(entry._module.make)
    assert bool(entry.options) == hasattr(entry._module, "recognise")
    assert {*entry.needs} <= {*earlier}
    assert {*entry.also_for} <= {option.name for _, option in hook_options.all_options()}
