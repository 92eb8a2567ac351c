"""The `lrlab` command, in fresh interpreters as a user starts it."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lrlab_command import COMMAND, lrlab, lrlab_here

from diffusers_lrlab.cli.main import COMMANDS, main
from diffusers_lrlab.cli.show import LISTED
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.options import options_of
from diffusers_lrlab.training.config import TrainingConfig

REGISTRIES = {
    word: pkgutil.resolve_name(f"diffusers_lrlab.{module}:{registry}") for word, (module, registry, _) in LISTED.items()
}


def refused(capsys, *arguments):
    """The one line in which `lrlab ...` refuses, by this interpreter, since it is quick."""
    assert main([str(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.splitlines(keepends=True) == [error]
    return error


# --- the command -----------------------------------------------------------------------------------------------------


PREVIEW = ("preview", "--lr_scheduler", "cosine", "--num_training_steps", "9")


QUICK = {("--help",): 0, ("list",): 0, PREVIEW: 0, ("train", "--help"): 0, ("train", "--lr_scheduler=cosin"): 2}


@pytest.mark.parametrize(("arguments", "status"), QUICK.items(), ids=str)
def test_what_should_be_quick_imports_nothing_heavy(arguments, status):
    shown = lrlab(*arguments, status=status, python=("-X", "importtime"))
    modules = re.findall(r"\| +([\w.]+)$", shown, re.MULTILINE)
    assert "diffusers_lrlab.core.registry" in modules
    assert not {"torch", "diffusers", "transformers", "matplotlib", "accelerate", "datasets"} & set(modules)


def test_alone_it_shows_its_help():
    """The installed script, on stderr and with the status of a wrong call, as nothing was done."""
    done = subprocess.run([Path(sys.executable).with_name("lrlab")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\b", done.stderr, re.MULTILINE)


def test_help_has_each_option_once_and_begins_with_the_ten_of_most_runs(capsys):
    def told(*arguments):
        with pytest.raises(SystemExit):
            main([*arguments])
        return capsys.readouterr().out

    def flags(text):
        return re.findall(r"^  (?:-h, )?(--\w+)", text, re.MULTILINE)

    known, text = options_of(TrainingConfig), told("train", "--help")
    every, first = flags(text), flags(text.partition("what most runs need:")[2].partition("\n\n")[0])
    assert every[: len(first)] == first
    assert {*first} == {"--help", "--config"} | {f"--{name}" for name, option in known.items() if option.is_first}
    assert len(first) == 12
    assert len({*every}) == len(every)
    assert {f"--{name}" for name, option in known.items() if not option.is_internal} - {"--plugins"} < {*every}
    assert "--import" in every
    assert not {flag for flag in every if flag.startswith("--no_")} | {"--local_rank"} & {*every}
    assert "  --use_ema, --no_use_ema\n" in text  # a switch that is on by default
    # Spellings of records and of diffusers work, and are named once.
    ending = " ".join(text.partition("Each option may be written")[2].split())
    assert "--ddpm_num_inference_steps for --num_inference_steps, --plugins for --import." in ending
    of_finder = told("find-lr", "-h").partition("what most runs need:")[2].partition("\n\n")[0]
    assert {*flags(of_finder)} == {*first, "--start_lr", "--end_lr", "--num_updates", "--repeats"}


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
        (["preview"], ["--lr_scheduler NAME", "lrlab list schedulers"]),
        (["preview", "--lr_schedular", "cosine"], ["'--lr_schedular'", "Did you mean '--lr_scheduler'?"]),
        (["study", "run", "quick", "--excutor", "pool"], ["'--excutor'", "Did you mean '--executor'?"]),
        (["study", "run", "quick", "--seeds", "3"], ["'--seeds'", "are keys of the study file, not flags"]),
        (["data", "export", "dino", "out", "--flip"], ["Unknown argument '--flip'", "See --help"]),
        (["preview", "--timestep_sampler", "uniform", "--lr_scheduler", "cosine"], ["--lr_scheduler", "Leave it out"]),
        (["preview", "--loss_weighting", "learned_log_variance"], ["'learned_log_variance'", "follows the losses"]),
        (["data", "encode", "digits", "out", "--va", "x"], ["Unknown argument '--va'", "Did you mean '--vae'?"]),
        ([*PREVIEW, "--num_training_steps", "0"], ["--num_training_steps 0", "in [1, 1e7]"]),
        ([*PREVIEW, "--num_training_steps", "1e4"], ["must be a whole number, such as 10000, got '1e4'"]),
        ([*PREVIEW, "--learning_rate", "nan"], ["--learning_rate: must be a number, such as 0.001, got 'nan'"]),
        ([*PREVIEW, "--out", "nowhere/a.png"], ["'nowhere'", "does not exist"]),
        ([*PREVIEW, "--out", "a.gif"], ["'a.gif'", ".png"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_errors_name_the_remedy(capsys, arguments, words):
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message


LATIN = os.fsdecode(b"photos\xe9")


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--output_dir", LATIN], ["extend", LATIN, "--max_train_steps", "4"], ["audit", "--out", LATIN, "--", "true"]],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / LATIN).mkdir()
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: an argument b'photos\\xe9': must be UTF-8 text, got b")
    assert [path.name for path in tmp_path.iterdir()] == [LATIN]


def test_programs_that_are_launched_or_audited_get_names_that_are_not_utf8_as_they_are():
    from diffusers_lrlab.cli.main import _parse
    from diffusers_lrlab.launch import make_parser as of_launcher

    assert of_launcher().parse_args(["script.py", "--name", LATIN]).arguments[-2:] == ["--name", LATIN]
    assert _parse(["audit", "--", "python", "--name", LATIN]).program[-2:] == ["--name", LATIN]
    with pytest.raises(LabError, match=r"an argument b'photos\\xe9': must be UTF-8 text"):
        of_launcher().parse_args(["--import", LATIN, "script.py"])


# --- list ------------------------------------------------------------------------------------------------------------


def test_the_registry_of_each_option_is_listed():
    of_options = {(f"--{name}", known.registry) for name, known in options_of(TrainingConfig).items() if known.registry}
    listed = {(flag, f"{module}:{registry}") for module, registry, flag in LISTED.values()}
    assert of_options - listed == {("--data_kind", "training.kinds:KINDS")}
    assert listed - of_options == {("--dataset_name", "data.image_sets:IMAGE_DATASETS")}


@pytest.mark.parametrize("kind", LISTED)
def test_list_shows_every_name_in_a_line_of_its_own(kind, capsys):
    assert main(["list", kind]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for entry in REGISTRIES[kind].values():
        for text in (entry.description, *(parameter.name for parameter in entry.parameters)):
            assert text in lines[entry.name]
    for alias, name in REGISTRIES[kind].aliases.items():
        assert alias in lines[name]


def test_list_shows_all_kinds_without_one(capsys):
    shown = lrlab_here(capsys, "list").splitlines()
    flags = [flag for _, _, flag in LISTED.values()]
    for flag in flags:
        assert len([line for line in shown if line.endswith(f"({flag})")]) == flags.count(flag)


def test_list_as_json_has_everything(capsys):
    kind = "schedulers"
    assert main(["list", kind, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
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
