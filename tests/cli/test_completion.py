"""The script of `lrlab completion bash`, asked as bash asks it."""

import subprocess
import sys

import pytest

from diffusers_lrlab.cli.main import COMMANDS, SHELLS, main

TYPED = {
    "lrlab tr": {"train"},
    "lrlab ": set(COMMANDS),
    "lrlab train --lr_scheduler re": {"reduce_lr_on_plateau", "rex"},
    "lrlab train --momentum_sch": {"--momentum_scheduler", "--momentum_scheduler_kwargs"},
    "lrlab find-lr --optimizer sg": {"sgd"},
    "lrlab list sch": {"schedulers"},
    "lrlab study r": {"run", "report"},
}


def test_commands_flags_and_names_are_completed(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for typed in TYPED:
        words = " ".join(f"'{word}'" for word in typed.split(" "))
        script += f"\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()\n"
        script += '_shtab_lrlab lrlab "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"; echo "ANSWER ${COMPREPLY[*]}"\n'
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True)
    answers = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    for (typed, expected), found in zip(TYPED.items(), answers, strict=True):
        assert expected <= found, typed
        assert typed == "lrlab " or expected == found, typed


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_each_shell(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    assert "lr_scheduler" in capsys.readouterr().out


def test_what_it_needs_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
