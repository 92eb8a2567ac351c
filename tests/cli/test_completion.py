"""The script of `lrlab completion bash`, asked as bash asks it, and where it is installed."""

import subprocess
import sys

import pytest

from diffusers_lrlab.cli.completion import SHELLS
from diffusers_lrlab.cli.main import COMMANDS, main

TYPED = {
    "lrlab tr": {"train"},
    "lrlab ": set(COMMANDS),
    "lrlab train --lr_scheduler re": {"reduce_lr_on_plateau", "rex"},
    "lrlab train --momentum_sch": {"--momentum_scheduler", "--momentum_scheduler_kwargs"},
    "lrlab find-lr --stop_f": {"--stop_factor"},
    "lrlab rerun --compa": {"--compare"},
    "lrlab plan --optimizer sg": {"sgd"},
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
def test_it_is_installed_where_the_shell_looks_and_only_over_its_own(shell, tmp_path, monkeypatch, capsys):
    pytest.importorskip("shtab")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "my data"))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)
    for _ in range(2):
        assert main(["completion", "--install"]) == 0
    said = capsys.readouterr().out
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert str(written) in said or str(written.parent) in said
    assert main(["completion", shell]) == 0
    assert written.read_text() == capsys.readouterr().out
    written.write_text("of someone else")
    assert main(["completion", "--install"]) == 2
    assert "is not a script of lrlab completion. Hint: move it away" in capsys.readouterr().err
    assert written.read_text() == "of someone else"


def test_a_shell_without_completion_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 2
    assert "SHELL='fish': must be one of bash, zsh, tcsh, got 'fish'" in capsys.readouterr().err


def test_what_it_needs_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
