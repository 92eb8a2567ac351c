"""The remedies that errors name exist for the command that prints them."""

import ast
import functools
import re
from pathlib import Path

import pytest
from tables import cases

import diffusers_lrlab
from diffusers_lrlab.cli.main import COMMANDS, REST, _parser, main
from diffusers_lrlab.cli.remedies import flags_of, foreign_flags, note_owner, subparsers_of
from diffusers_lrlab.core.errors import DiskFull, Interrupted, LabError, continued_by, system_errors_explained
from diffusers_lrlab.core.files import full_disk_explained
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.launch import make_parser as parser_of_launcher
from diffusers_lrlab.run.averages import no_snapshots
from diffusers_lrlab.study.runs.progress import stops_explained
from diffusers_lrlab.training.arguments import make_parser

PARSERS = subparsers_of(_parser())
OF_TRAINING = flags_of(make_parser("", [FinderConfig]))
WITHOUT_OPTIONS_OF_TRAINING = [name for name in COMMANDS if name not in REST]
PACKAGE = Path(diffusers_lrlab.__file__).parent
OTHER_PROGRAMS = set(  # accelerate, torchrun, git and LaTeX; placeholders
    "--multi_gpu --dynamo_backend --cpu --nproc_per_node --use_fsdp --fsdp_version --fsdp_state_dict_type --rwrap "
    "--porcelain --untracked-files --its_own_option --option --name --x --no_x --no_ --lr_ --ema_ --hub".split()
)


@functools.cache
def texts_with_flags():
    """Texts of the package, but for patches and the hooks of the launcher, which name flags of other programs' scripts."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in ("diffusers_plugin", "upstream"):
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in dict.fromkeys(found) if flags_in(text)]


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)


def test_each_flag_that_a_text_names_exists():
    known = flags_of(_parser()) | OF_TRAINING | flags_of(parser_of_launcher())
    named = {flag for text in texts_with_flags() for flag in flags_in(text)}
    assert len(named) > 130
    assert named - known == OTHER_PROGRAMS & named


@cases("command", WITHOUT_OPTIONS_OF_TRAINING)
def test_an_error_says_which_of_the_flags_in_it_the_command_lacks(command):
    flags, own = flags_of(PARSERS[command]), 0
    for text in texts_with_flags():
        error = LabError(text)
        note_owner(error, command, PARSERS[command])
        told, _, note = str(error).partition(" Note: ")
        assert told == text
        assert flags_in(note.partition(" of `lrlab train`")[0]) == foreign_flags(text, flags)
        own += not note
    assert own > 20


@cases("command", WITHOUT_OPTIONS_OF_TRAINING)
def test_what_ends_a_command_early_names_no_flag_that_it_lacks(command):
    def is_in_the_way():
        with full_disk_explained(Path("run.json")):
            raise IsADirectoryError("is a folder")

    def is_killed():
        with system_errors_explained():
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    told = [str(DiskFull(Path("run.json"), "No space left on device")), str(Interrupted(15, Path("checkpoint-2")))]
    for fail in (is_in_the_way, is_killed):
        with pytest.raises(LabError) as error:
            fail()
        told.append(str(error.value))
    assert all("give the same command again" in text for text in told)
    assert all("--resume_from_checkpoint" not in text and "--overwrite_output_dir" not in text for text in told)


def test_the_outermost_command_says_how_it_is_continued(tmp_path):
    latest = "give the same command again with --resume_from_checkpoint latest"
    assert "--resume_from_checkpoint" in OF_TRAINING
    with continued_by(latest):
        assert f"whole update. To go on, {latest} (checkpoint-2)." in str(Interrupted(15, Path("checkpoint-2")))
    with continued_by("pull again"), continued_by(latest):
        assert str(DiskFull(Path("a"), "full")).endswith("Free some space, then pull again.")
    with stops_explained(tmp_path), continued_by(latest):
        assert str(DiskFull(Path("a"), "full")).endswith("then give the same command again: finished runs are kept.")
    assert str(DiskFull(Path("a"), "full")).endswith("then give the same command again.")


def test_a_command_says_whose_option_it_was_given(capsys):
    assert main(["extend", "my-run", "--max_train_steps", "9", "--train_batch_size=4"]) == 2
    told = capsys.readouterr().err
    assert told.endswith("Note: --train_batch_size is an option of `lrlab train`, not of `lrlab extend`.\n")


def test_a_run_whose_snapshots_were_not_downloaded_was_trained_with_some(tmp_path):
    told = str(no_snapshots(tmp_path, {"config": {"ema": "posthoc:sigma_rels=[0.05|0.1]"}}))
    assert "not trained" not in told
    assert "the run took some, which are not here; uploads do not include them. Hint: use the folder in which it" in told
    assert "it was not trained with `--ema posthoc`" in str(no_snapshots(tmp_path, {"config": {"ema": "constant"}}))
