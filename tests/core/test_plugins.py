"""Code of others, from files, modules and installed packages."""

from importlib.metadata import EntryPoint

import pytest
from registrations import restored

from diffusers_lrlab.core import plugins
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.plugins import load_plugins, loaded_plugins
from diffusers_lrlab.schedules.registries import SCHEDULERS

PLUGIN = """
from diffusers_lrlab.core.registry import Parameter
from diffusers_lrlab.schedules.registries import SCHEDULERS

@SCHEDULERS.register(
    "NAME",
    description="falls by a power",
    source="a test",
    parameters=(Parameter("power", float, 2.0, "of the fall", "(0, 9]"),),
)
def falling(progress, power):
    return (1 - progress.fraction) ** power
"""


@pytest.fixture(autouse=True)
def nothing_stays():
    """Names and notes of what was loaded are gone after each test."""
    with restored(SCHEDULERS, plugins._loaded):
        yield


def write(path, name):
    path.write_text(PLUGIN.replace("NAME", name))
    return path


def test_a_file_is_run_once_and_its_names_are_known(tmp_path):
    from diffusers_lrlab import list_schedulers, lr_curve

    file = write(tmp_path / "mine.py", "of_a_file")
    before = len(loaded_plugins())
    load_plugins(f"{file}, {file}")
    load_plugins(str(file))
    assert len(loaded_plugins()) == before + 1
    assert "of_a_file" in list_schedulers()
    assert lr_curve("of_a_file:power=1", 1.0, 0, 4).tolist() == pytest.approx([1, 0.75, 0.5, 0.25])


def test_diffusers_knows_a_name_that_was_registered_after_it_was_imported(tmp_path):
    import torch
    from diffusers.optimization import SchedulerType, get_scheduler

    load_plugins(str(write(tmp_path / "late.py", "of_a_late_file")))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler("of_a_late_file", optimizer, num_warmup_steps=0, num_training_steps=4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.75**2)]
    assert SchedulerType("of_a_late_file").value == "of_a_late_file"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "no such file"),
        ("no_such_module_of_anybody", None, "no such module"),
        ("broken.py", "x = 1\nraise KeyError('oh')", r"broken\.py:2: KeyError"),
        ("missing_inside.py", "import no_such_module_of_anybody", "ModuleNotFoundError"),
        (
            "exits.py",
            "import sys\nsys.exit(0)",
            r"exits\.py:2: it ended the program \(SystemExit: 0\)\. Hint: raise an error",
        ),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path, monkeypatch, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LabError, match=message):
        load_plugins(name)
    assert not any(one["name"] == name for one in loaded_plugins())


def test_names_of_an_installed_package_are_known(tmp_path, monkeypatch, capsys):
    """And a broken package is named and left out."""
    write(tmp_path / "their_schedules.py", "of_a_package")
    (tmp_path / "their_broken.py").write_text("raise RuntimeError('broken')")
    modules = {"their": "their_schedules", "broken": "their_broken"}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_installed", False)
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [EntryPoint(name, module, group) for name, module in modules.items()],
    )
    assert "of_a_package" in SCHEDULERS
    assert "'broken' (their_broken) was skipped: RuntimeError: broken" in capsys.readouterr().err


def test_a_name_that_no_spec_string_could_hold_is_refused(tmp_path):
    with pytest.raises(LabError, match="'of-a-file': must be a Python identifier"):
        load_plugins(str(write(tmp_path / "mine.py", "of-a-file")))
