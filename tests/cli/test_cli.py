"""The `lrlab` command, by fresh interpreters as a user starts it, and the arithmetic behind `lrlab preview`."""

import inspect
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.cli.lists import LISTED
from diffusers_lrlab.cli.main import COMMANDS, main
from diffusers_lrlab.core.terminal_plot import terminal_plot
from diffusers_lrlab.data.toy2d_entries import TOY_DATASETS
from diffusers_lrlab.models.registry import DENOISERS
from diffusers_lrlab.objective.noise import NOISES
from diffusers_lrlab.objective.process import OBJECTIVES
from diffusers_lrlab.optimizers.entries import OPTIMIZERS
from diffusers_lrlab.preview.schedules import Run, preview
from diffusers_lrlab.schedules.expected import lr_curve
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_LRS, TIMESTEP_SAMPLERS

COMMAND = [sys.executable, "-W", "error", "-m", "diffusers_lrlab.cli.main"]
REGISTRIES = {
    "schedulers": SCHEDULERS,
    "momentum": MOMENTUM_SCHEDULERS,
    "timesteps": TIMESTEP_SAMPLERS,
    "weightings": LOSS_WEIGHTINGS,
    "timestep_lrs": TIMESTEP_LRS,
    "objectives": OBJECTIVES,
    "noises": NOISES,
    "optimizers": OPTIMIZERS,
    "ema_forms": EMA_FORMS,
    "denoisers": DENOISERS,
    "datasets": TOY_DATASETS,
}


def lrlab(*arguments, status=0, encoding="utf-8", python=(), **env):
    """What `lrlab ...` prints; on an error, what it says about it."""
    command = [COMMAND[0], *python, *COMMAND[1:], *map(str, arguments)]
    env = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80", **env}
    done = subprocess.run(command, capture_output=True, encoding=encoding, env=env)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status == 0 and not python:
        assert done.stderr == ""
    return done.stderr if status or python else done.stdout


def refused(capsys, *arguments):
    """The one line in which `lrlab ...` refuses, by this interpreter, since it is quick."""
    assert main([str(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.endswith("\n")
    return error


def previewed(*arguments):
    """`lrlab preview ... --json`."""
    return json.loads(lrlab("preview", *arguments, "--json"))


# --- the command -----------------------------------------------------------------------------------------------------


def test_it_is_installed_under_its_name():
    script = Path(sys.executable).with_name("lrlab")
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
        assert name in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["list", "--json"],
        ["preview", "--lr_scheduler", "cosine", "--num_training_steps", "9", "--num_processes", "2"],
        ["preview", "--lr_scheduler", "mdlrc", "--num_training_steps", "9", "--json"],
    ],
    ids=" ".join,
)
def test_what_should_be_quick_imports_nothing_heavy(arguments):
    modules = re.findall(r"\| +([\w.]+)$", lrlab(*arguments, python=("-X", "importtime")), re.MULTILINE)
    assert "diffusers_lrlab.core.registry" in modules
    assert not {"torch", "diffusers", "transformers", "matplotlib", "accelerate"} & set(modules)


def test_alone_it_shows_its_help():
    """On stderr and with the status of a wrong call, as nothing was done."""
    told = lrlab(status=2)
    assert told == lrlab("--help")
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\b", told, re.MULTILINE)


@pytest.mark.parametrize("name", ["train", "find-lr"])
def test_help_has_each_option_once(name, capsys):
    """A switch that is on by default beside its `--no_...`, with the default of the switch."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = re.findall(r"^  (--?\w.*?)(?:  .*)?$", capsys.readouterr().out, re.MULTILINE)
    names = [re.sub(r"^(no|auto)_", "", flag[2:]) for line in shown for flag in re.findall(r"--[\w-]+", line)[:1]]
    assert "--use_ema, --no_use_ema" in shown
    assert "--streaming" in shown
    assert not [line for line in shown if line.startswith("--no_")]
    assert len(set(names)) == len(names) - 1  # --learning_rate and --auto_learning_rate


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_each_command_and_its_example_is_understood(name, capsys):
    from diffusers_lrlab.cli.main import SCRIPTS, _parse

    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert (f"usage: lrlab {name} [" if name in SCRIPTS else "Example: lrlab") in capsys.readouterr().out
    assert _parse(COMMANDS[name].example.split()[1:]).command == name


def test_whoever_stops_reading_gets_no_traceback():
    reader = f"{' '.join(COMMAND)} list --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", reader], capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lits"], ["'lits'", "Did you mean 'list'?", "preview"]),
        (["list", "scheduler"], ["'scheduler'", "Did you mean 'schedulers'?", "momentum"]),
        (["list", "models"], ["'models'", "Known: schedulers"]),
        (["list", "--json", "--markdown"], ["--markdown", "--json"]),
        (["preview"], ["--lr_scheduler NAME", "lrlab list schedulers"]),
        (["preview", "--lr_schedular", "cosine"], ["'--lr_schedular'", "Did you mean '--lr_scheduler'?"]),
        (["preview", "--lr_scheduler", "cosin", "--num_training_steps", "9"], ["'cosin'", "Did you mean 'cosine'?"]),
        (["preview", "--lr_scheduler", "cosine"], ["--num_training_steps", "such as 10000"]),
        (["preview", "--lr_scheduler", "step:gama=1", "--num_training_steps", "9"], ["'gama'", "Did you mean 'gamma'?"]),
        (["preview", "--all"], ["--out"]),
        (["preview", "--timestep_sampler", "clt"], ["'clt'", "Did you mean 'clts'?"]),
        (["preview", "--lr_scheduler", "mine", "--num_training_steps", "9"], ["polynomial", "--import FILE_OR_MODULE"]),
        (["preview", "--timestep_sampler", "clts"], ["'clts'", "num_training_steps"]),
        (["preview", "--timestep_sampler", "uniform", "--lr_scheduler", "cosine"], ["--lr_scheduler", "Leave it out"]),
        (["preview", "--loss_weighting", "min_snr:gamma=0"], ["gamma=0", "(0, inf)"]),
        (["preview", "--loss_weighting", "learned_log_variance"], ["'learned_log_variance'", "follows the losses"]),
        (["preview", "--timestep_sampler", "uniform", "--ddpm_num_steps", "0"], ["num_train_timesteps=0", "in [1, 1e7]"]),
        (["preview", "--lr_scheduler", "cosine", "--ddpm_num_steps", "9"], ["--num_train_timesteps", "--timestep_sampler"]),
        (["preview", "--all", "--out", "a.png", "--beta1", "0.9"], ["--beta1", "--all", "Leave it out"]),
        (["upstream-patch", "rex"], ["--diffusers", "upstream-patch --help"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_errors_name_the_remedy(capsys, arguments, words):
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num_warmup_steps", "9"], ["Warm-up of 9 updates", "9 updates", "at most 8"]),
        (["--num_warmup_steps", "-1"], ["-1"]),
        (["--num_warmup_steps", "inf"], ["inf", "--num_warmup_steps"]),
        (["--num_warmup_steps", "1.5"], ["1.5"]),
        (["--num_training_steps", "0"], ["--num_training_steps 0", "in [1, 1e7]"]),
        (["--num_training_steps", "1e4"], ["must be a whole number, such as 10000, got '1e4'"]),
        (["--num_training_steps", 10**20], ["in [1, 1e7]"]),
        (["--num_processes", "0"], ["--num_processes 0"]),
        (["--gradient_accumulation_steps", "-2"], ["--gradient_accumulation_steps -2"]),
        (["--num_processes", 10**30], ["in [1, 1e5]"]),
        (["--learning_rate", "0"], ["--learning_rate 0", "1e-4"]),
        (["--learning_rate", "nan"], ["--learning_rate: must be a number, such as 0.001, got 'nan'"]),
        (["--beta1", "1"], ["--beta1 1:", "(0, 1)"]),
        (["--out", "nowhere/a.png"], ["'nowhere'", "does not exist"]),
        (["--out", "a.gif"], ["'a.gif'", ".png"]),
        (["--lr_scheduler_kwargs", "{x"], ["--lr_scheduler_kwargs", "JSON"]),
        (["--lr_scheduler_kwargs", '{"num_cycle": 1}'], ["'num_cycle'", "Did you mean 'num_cycles'?"]),
        (["--lr_scheduler", "rex", "--lr_scheduler_kwargs", "{}"], ["--lr_scheduler_kwargs", "spec strings"]),
        (["--momentum_scheduler_kwargs", "{}"], ["--momentum_scheduler_kwargs", "--momentum_scheduler."]),
        (["--momentum_scheduler", "demo"], ["'demo'", "Did you mean 'demon'?"]),
        (["--lr_scheduler", "one_cycle", "--momentum_scheduler", "demon"], ["'one_cycle'", "'demon'", "one of them"]),
        (["--lr_scheduler", "constant", "--num_warmup_steps", "2"], ["'constant'", "'constant_with_warmup'"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_previews_that_cannot_be(capsys, options, words):
    message = refused(capsys, "preview", "--lr_scheduler", "cosine", "--num_training_steps", "9", *options)
    for word in words:
        assert word in message


def test_an_error_is_one_line_and_the_status_2():
    message = lrlab("preview", "--lr_scheduler", "cosin", "--num_training_steps", 9, status=2)
    assert message.startswith("error: Unknown learning-rate schedule 'cosin'. Did you mean 'cosine'? Known: ")
    assert message.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    options = ["--lr_scheduler", "cosine", "--num_training_steps", "9", "--out", tmp_path / "a.png"]
    assert "a.png" in refused(capsys, "preview", *options)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.png"]


# --- list ------------------------------------------------------------------------------------------------------------


def test_the_kinds_are_the_registries():
    assert LISTED.keys() == REGISTRIES.keys()


@pytest.mark.parametrize("kind", LISTED)
def test_list_shows_every_name_in_a_line_of_its_own(kind, capsys):
    assert main(["list", kind]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for entry in REGISTRIES[kind].values():
        for text in (entry.description, *(parameter.name for parameter in entry.parameters)):
            assert text in lines[entry.name]
    for alias, name in REGISTRIES[kind].aliases.items():
        assert alias in lines[name]


def test_list_shows_all_kinds_without_one():
    shown = lrlab("list").splitlines()
    for _, _, flag in LISTED.values():
        assert len([line for line in shown if line.endswith(f"({flag})")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", LISTED)
def test_list_as_json_has_everything(kind):
    shown = json.loads(lrlab("list", kind, "--json"))
    assert list(shown) == [kind]
    assert [entry["name"] for entry in shown[kind]] == list(REGISTRIES[kind])
    for entry in shown[kind]:
        known = REGISTRIES[kind][entry["name"]]
        assert (entry["description"], entry["source"]) == (known.description, known.source)
        assert all(REGISTRIES[kind].aliases[alias] == known.name for alias in entry["aliases"])
        assert entry["facts"] == dict(known.facts)
        for key, parameters in (("parameters", known.parameters), ("common_parameters", known.common)):
            assert [parameter["name"] for parameter in entry[key]] == [parameter.name for parameter in parameters]
            for parameter, p in zip(entry[key], parameters, strict=True):
                default = list(p.default) if isinstance(p.default, tuple) else p.default
                assert (parameter["default"], parameter["allowed"], parameter["help"]) == (default, p.allowed, p.help)


def test_list_as_markdown_is_the_registries_tables():
    assert lrlab("list", "schedulers", "--markdown") == f"{SCHEDULERS.table()}\n\n{SCHEDULERS.common_table()}\n"
    assert lrlab("list", "momentum", "--markdown") == f"{MOMENTUM_SCHEDULERS.table()}\n"
    # The source of one entry is a dash that ASCII lacks.
    assert "| ? |" in lrlab("list", "momentum", "--markdown", encoding="ascii")


def test_a_terminal_gets_lines_that_fit_and_colours(monkeypatch):
    def in_terminal(*arguments, **env):
        ours, theirs = pty.openpty()
        env = {**os.environ, "COLUMNS": "70", "PYTHONIOENCODING": "utf-8", **env}
        with subprocess.Popen([*COMMAND, *arguments], stdout=theirs, stdin=theirs, env=env):
            os.close(theirs)
            shown = b""
            try:
                while part := os.read(ours, 65536):
                    shown += part
            except OSError:  # how Linux says that nobody writes any more
                pass
        os.close(ours)
        return shown.decode().replace("\r\n", "\n")

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert max(map(len, in_terminal("list", "optimizers").splitlines())) <= 70
    options = ["preview", "--lr_scheduler", "cosine", "--lr_scheduler", "rex", "--num_training_steps", "100"]
    assert "\033[36m" in in_terminal(*options)
    assert "\033[" not in in_terminal(*options, NO_COLOR="1")


# --- upstream-patch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        (["--out", "a.patch"], {"out": Path("a.patch"), "branch": None}, "Wrote made."),
        (["--branch", "b"], {"out": None, "branch": "b"}, "Committed to the new branch made of clone."),
    ],
    ids=str,
)
def test_a_patch_is_made_as_asked(monkeypatch, capsys, options, given, said):
    from diffusers_lrlab.upstream import patch as upstream

    calls = []
    monkeypatch.setattr(upstream, "upstream_patch", lambda *args, **kwargs: calls.append((args, kwargs)) or "made")
    assert main(["upstream-patch", "rex", "--diffusers", "clone", *options]) == 0
    assert calls == [(("rex", Path("clone")), given)]
    assert capsys.readouterr().out == said + "\n"


# --- preview: the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", ["0", "7", "0.1"])
def test_json_has_the_promised_curves(warmup):
    specs = ["cosine:num_cycles=1.5", "rex:d=0.9", "one_cycle", "wsd:num_decay_steps=0.3", "reduce_lr_on_plateau"]
    options = [part for spec in specs for part in ("--lr_scheduler", spec)]
    shown = previewed(*options, "--num_training_steps", 60, "--num_warmup_steps", warmup, "--learning_rate", "3e-4")
    assert shown["updates"] == 60
    assert [schedule["spec"] for schedule in shown["schedules"]] == specs
    for schedule in shown["schedules"]:
        promised = lr_curve(schedule["spec"], 3e-4, float(warmup), 60)
        np.testing.assert_allclose(schedule["lr"], promised, rtol=1e-12, atol=0)
        assert "diffusers" not in schedule
        assert (schedule["beta1"] is not None) == (schedule["spec"] == "one_cycle")
    assert "validation loss" in shown["schedules"][-1]["notes"][0]


def test_json_with_arguments_and_momentum():
    shown = previewed(
        *("--lr_scheduler", "constant_with_warmup", "--lr_scheduler_kwargs", '{"warmup_type": "cosine"}'),
        *("--momentum_scheduler", "mdlrc", "--momentum_scheduler_kwargs", '{"min_momentum": 0.2}'),
        *("--num_training_steps", 40, "--num_warmup_steps", 10, "--beta1", 0.9),
    )
    (schedule,) = shown["schedules"]
    assert schedule["spec"] == "constant_with_warmup:warmup_type=cosine"
    assert schedule["momentum"] == "mdlrc:min_momentum=0.2"
    share = np.clip((np.arange(40) - 10) / 30, 0, 1)
    beta1 = np.maximum(0.9 * (1 - share) / (0.1 + 0.9 * (1 - share)), 0.2)
    ramp = np.minimum(0.5 * (1 - np.cos(np.pi * np.arange(40) / 10)) * (np.arange(40) < 10) + (np.arange(40) >= 10), 1)
    np.testing.assert_allclose(schedule["beta1"], beta1, rtol=1e-12)
    np.testing.assert_allclose(schedule["lr"], 1e-4 * ramp * 0.1 / (1 - beta1), rtol=1e-12)


def test_a_rate_that_is_lowered_twice_is_said():
    shown = lrlab("preview", "--lr_scheduler", "cosine", "--momentum_scheduler", "mdlrc", "--num_training_steps", 40)
    assert "changes the learning rate by itself, on top of 'cosine'" in shown


def stepped_by_accelerate(build, num_updates, warmup, processes, accumulation, monkeypatch):
    """What train_unconditional.py of diffusers applies: its arguments, and accelerate's own scheduler wrapper."""
    import accelerate.scheduler
    import torch
    from accelerate.state import GradientState

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    # train_unconditional.py:523-528, with as many micro-batches as these updates need.
    lengths = {"num_warmup_steps": warmup * accumulation, "num_training_steps": num_updates * accumulation * processes}
    takes = inspect.signature(build).parameters
    scheduler = build(optimizer, **{name: length for name, length in lengths.items() if name in takes})
    state = SimpleNamespace(num_processes=processes)
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: state)
    wrapped = accelerate.scheduler.AcceleratedScheduler(scheduler, SimpleNamespace(step_was_skipped=False))
    applied = []
    try:
        for micro_batch in range(num_updates * accumulation):
            syncs = (micro_batch + 1) % accumulation == 0
            GradientState()._set_sync_gradients(syncs)
            if syncs:
                applied.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            wrapped.step()
    finally:
        GradientState()._set_sync_gradients(True)
    return np.array(applied)


HOST_FUNCTIONS = {
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
}


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 2), (1, 4), (4, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("name", HOST_FUNCTIONS)
def test_diffusers_own_script_is_foretold(name, processes, accumulation, monkeypatch):
    from diffusers import optimization

    build = getattr(optimization, HOST_FUNCTIONS[name])
    applied = stepped_by_accelerate(build, 30, 5, processes, accumulation, monkeypatch)
    shown = preview(name, Run(30, 5, num_processes=processes, accumulation=accumulation))
    np.testing.assert_allclose(shown.host.lr, applied, rtol=1e-12, atol=1e-20)
    assert f"ends at {100 * applied[-1] / 1e-4:.1f}".removesuffix(".0") in shown.notes[0]
    reached = int(np.argmax(applied >= applied.max() * (1 - 1e-9)))
    if reached != 5:
        assert f"reaches it at update {reached} instead of 5" in shown.notes[0]


def test_the_line_about_diffusers_own_script():
    options = ["--lr_scheduler", "cosine", "--num_training_steps", 100, "--num_warmup_steps", 5]
    shown = lrlab("preview", *options, "--gradient_accumulation_steps", 4)
    assert shown.endswith(
        "diffusers' own script, 1 process x accumulation 4: ends at 89.7 % of the peak instead of 0 %; reaches it at "
        "update 20 instead of 5\n"
    )
    shown = lrlab("preview", *options, "--num_processes", 5)
    assert "5 processes x accumulation 1: ends at 0 % of the peak, as asked; reaches it at update 1 instead of 5" in shown
    assert "diffusers" not in lrlab("preview", *options)


def test_a_peak_that_diffusers_own_script_never_reaches():
    shown = preview("cosine", Run(18, 5, accumulation=4))
    assert "ends at 85 % of the peak instead of 1.5 %; never reaches it, where update 5 was asked" in shown.notes[0]


@pytest.mark.parametrize(
    ("spec", "momentum", "why"),
    [
        ("reduce_lr_on_plateau", None, "no validation loss"),
        ("cosine", "demon", "no --momentum_scheduler"),
        ("join:schedules=[constant|rex],boundaries=[15]", None, "the first must come after the 20 updates of warm-up"),
    ],
)
def test_what_diffusers_own_script_cannot_run(spec, momentum, why):
    shown = preview(spec, Run(40, 5, accumulation=4), momentum=momentum)
    assert shown.as_json(asked_for_host=True)["diffusers"] is None
    assert f"cannot run {spec}" in shown.notes[-1]
    assert why in shown.notes[-1]


def test_json_with_diffusers_own_script():
    shown = previewed("--lr_scheduler", "mdlrc", "--num_training_steps", 40, "--gradient_accumulation_steps", 2)
    host = shown["schedules"][0]["diffusers"]
    beta1 = 0.95 * (1 - np.arange(40) / 80) / (0.05 + 0.95 * (1 - np.arange(40) / 80))
    np.testing.assert_allclose(host["beta1"], beta1, rtol=1e-12)
    np.testing.assert_allclose(host["lr"], 1e-4 * 0.05 / (1 - beta1), rtol=1e-12)


# --- preview: the pictures -------------------------------------------------------------------------------------------


FALLING, FLAT = np.linspace(4.0, 0.0, 20), np.full(20, 2.0)


def test_a_curve_in_a_terminal():
    assert terminal_plot({"falling": FALLING}, "one", width=18, height=4).splitlines() == [
        "one",
        " 4 │⠉⠢⠤⡀",
        "   │   ⠈⠑⠤⢄",
        "   │       ⠉⠒⠢⡀",
        "   │          ⠈⠑⠒⢄",
        " 0 └──────────────",
        "    0   update  19",
    ]


def test_two_curves_in_a_terminal_that_knows_only_ascii():
    shown = terminal_plot({"falling": FALLING, "flat": FLAT, "also": FLAT}, "two", width=18, height=5, unicode=False)
    assert shown.splitlines() == [
        "two",
        " 4 |***",
        "   |  ****",
        "   |o+o+o+*o++o+o+",
        "   |         ***",
        "   |            **",
        " 0 +--------------",
        "    0   update  19",
        "    * falling",
        "    o flat",
        "    + also",
    ]


def test_two_curves_in_a_terminal_with_colours():
    shown = terminal_plot({"falling": FALLING, "flat": FLAT}, "", width=18, height=5, color=True)
    plain = re.sub(r"\033\[\d*m", "", shown)
    assert "   │⠤⠤⠤⠤⠤⠤⠵⠤⡤⠤⠤⠤⠤⠤" in plain.splitlines()
    assert plain.endswith("    ── falling\n    ── flat")
    assert shown.count("\033[36m") > 10
    assert shown.count("\033[33m") > 10


def test_plots_of_one_update_and_of_a_flat_curve():
    assert "0.5 │⠉" in terminal_plot({"flat": np.full(1, 0.5)}, "", from_zero=False)
    assert "0 └" in terminal_plot({"flat": np.zeros(3)}, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_terminal_gets_what_it_can_show(encoding):
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex", "--num_training_steps", 200]
    shown = lrlab("preview", *options, encoding=encoding)
    assert ("└" in shown) == (encoding == "utf-8")
    assert shown.isascii() == (encoding != "utf-8")
    assert max(map(len, shown.splitlines())) <= 80
    assert "beta1" in shown
    assert re.search(r"^rex +0\.0001 .* 9\.\d+e-07$", shown, re.MULTILINE)


def colors(path):
    picture = Image.open(path).convert("RGB")
    return {color for _, color in picture.getcolors(picture.width * picture.height)}


def test_a_picture_has_every_curve(tmp_path):
    out = tmp_path / "preview.png"
    options = ["--lr_scheduler", "one_cycle", "--lr_scheduler", "rex:d=0.9", "--num_training_steps", 200]
    assert lrlab("preview", *options, "--gradient_accumulation_steps", 2, "--out", out).endswith(f"Wrote {out}.\n")
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colors(out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_picture_and_json_at_once(tmp_path):
    out = tmp_path / "preview.svg"
    assert previewed("--lr_scheduler", "cosine", "--num_training_steps", 20, "--out", out)["updates"] == 20
    assert "<!-- learning rate -->" in out.read_text()


@pytest.mark.slow
def test_the_gallery_shows_every_schedule(tmp_path):
    out = tmp_path / "all.svg"
    assert lrlab("preview", "--all", "--out", out) == f"Wrote {out}.\n"
    drawn = re.findall(r"<!-- (.*) -->", out.read_text())
    assert set(SCHEDULERS) <= set(drawn)
    assert any("made-up" in text for text in drawn)


def test_feedback_schedules_in_the_gallery_react_to_the_losses():
    from diffusers_lrlab.preview.plots import feedback_lrs, made_up_losses

    losses = made_up_losses()
    lrs = feedback_lrs("reduce_lr_on_plateau", {"factor": 0.5, "patience": 5}, losses)
    np.testing.assert_allclose(lrs[:51], 1e-4 * np.minimum(np.arange(51) / 50, 1))
    assert lrs[300] == 1e-4
    assert lrs[-1] < 0.6e-4


# --- timesteps -------------------------------------------------------------------------------------------------------


def test_densities_and_weights_are_shown_as_they_are(tmp_path):
    out = tmp_path / "densities.png"
    arguments = ["--timestep_sampler", "speed", "--timestep_sampler", "clts", "--loss_weighting", "min_snr"]
    arguments = ["preview", *arguments, "--num_training_steps", 10]
    shown = {row["name"]: row for row in json.loads(lrlab(*arguments, "--json", "--out", out))}
    assert shown["speed"]["updates"] == [0]
    assert shown["speed"]["values"][0][:1] == [pytest.approx(5 * 1000 / 3800)]
    assert shown["clts"]["updates"] == [0, 5, 10]
    assert shown["clts"]["values"][0] == pytest.approx([1] * 1000)
    assert shown["clts"]["values"][2][300] == pytest.approx(1.5985, abs=5e-5)
    assert shown["min_snr"]["values"][0][100] == pytest.approx(0.58571, abs=5e-6)
    with Image.open(out) as picture:
        assert min(picture.size) > 200
    table = lrlab(*arguments)
    assert "clts at update 10: density / uniform" in table
    assert "min_snr: weight" in table


@pytest.mark.slow
def test_all_densities_and_weights_fit_into_a_picture(tmp_path):
    out = tmp_path / "all.png"
    arguments = ["--timestep_sampler", "all", "--loss_weighting", "all", "--num_training_steps", 100, "--ddpm_num_steps", 20]
    shown = lrlab("preview", *arguments, "--out", out)
    for registry in (TIMESTEP_SAMPLERS, LOSS_WEIGHTINGS):
        for name, entry in registry.items():
            assert (f"{name}:" in shown or f"{name} at" in shown) == ("feedback" not in entry.traits)
    with Image.open(out) as picture:
        assert min(picture.size) > 1000
