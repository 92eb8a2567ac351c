"""Every file that a finished run or study leaves, damaged in every way: `check` names it, and `push` refuses."""

import json
import shutil

import pytest
import runs
import started
import yaml
from faults.cases import MODEL, OPTIONS, STUDY
from faults.injected import DAMAGE
from lrlab_command import said

from diffusers_lrlab.core.manifest import MANIFEST
from diffusers_lrlab.study.report.report import write_study_card

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with two checkpoints, a study, and the card of that study."""
    base = tmp_path_factory.mktemp("made")
    (base / "config.json").write_text(json.dumps(MODEL))
    (base / "study.yaml").write_text(yaml.safe_dump(STUDY))
    runs.run(*OPTIONS, f"--model_config_name_or_path={base / 'config.json'}", f"--output_dir={base / 'run'}")
    study = ("-m", "diffusers_lrlab.cli.main", "study", "run", base / "study.yaml", "--out", base / "study")
    status, _, error = started.run(*study, env=runs.environment())
    assert status == 0, error
    write_study_card(base / "study", base / "card")
    return base


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("kind", "how"), [("run", "gone"), ("study", "bit"), ("card", "half")])
def test_every_file_damaged(made, tmp_path, capsys, kind, how):
    folder = shutil.copytree(made / kind, tmp_path / kind)
    change, unnoticed, names = DAMAGE[how], [], files_of(folder)
    assert len(names) > 12
    (folder / "mine.txt").write_text("mine")
    status, text = said(capsys, "check", folder)
    assert (status, "files of manifest.json" in text, "notes" in text) == (0, True, False), text
    for name in names:
        if change is None and name.name == MANIFEST and len(name.parts) == 1:
            continue  # without it, nothing can be verified
        content = (folder / name).read_bytes()
        (folder / name).unlink() if change is None else (folder / name).write_bytes(change(content))
        status, text = said(capsys, "check", folder)
        is_card = name.name == "README.md"
        if (status, str(name) in text) != (0 if is_card else 1, True):
            unnoticed.append(("check", str(name), text))
        if not is_card and not name.parts[0].startswith("checkpoint-"):  # which are not uploaded
            status, text = said(capsys, "push", folder, "--repo_id=user/x")
            if (status, name.name in text) != (2, True):
                unnoticed.append(("push", str(name), text))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    assert not unnoticed


def test_the_committed_cards_are_whole(capsys):
    from published import ROOT

    for folder in (ROOT / "model_cards").iterdir():
        status, text = said(capsys, "check", folder)
        assert (status, "no manifest.json" in text) == (0, False), text


def test_a_study_that_was_killed_while_its_report_was_written_is_not_damaged(made, tmp_path, capsys, monkeypatch):
    import diffusers_lrlab.study.report.report as report

    def killed(*_):
        raise KeyboardInterrupt

    folder = shutil.copytree(made / "study", tmp_path / "study")
    shutil.copyfile(made / "config.json", tmp_path / "config.json")
    with monkeypatch.context() as patch:
        patch.setattr(report, "report_markdown", killed)
        said(capsys, "study", "report", folder)
    status, text = said(capsys, "check", folder)
    assert (status, "not finished" in text) == (0, True), text
    status, text = said(capsys, "push", folder, "--repo_id=user/x")
    assert (status, "is not finished" in text) == (2, True), text
    assert said(capsys, "study", "report", folder)[0] == 0
    status, text = said(capsys, "check", folder)
    assert (status, "notes" in text) == (0, False), text
