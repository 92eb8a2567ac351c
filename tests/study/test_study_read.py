"""The card of a study, its table of runs, and studies run and read from Python."""

import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml
from pyarrow import parquet
from small_studies import SPEC, read_summary, records, write_report
from tables import cases

import diffusers_lrlab as lab
import diffusers_lrlab.study.report.report as report
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.reading import read_runs, write_runs
from diffusers_lrlab.study.report.report import write_study_card
from diffusers_lrlab.study.results import StudyFolder
from diffusers_lrlab.study.shown_command import command_of_card

pytestmark = pytest.mark.usefixtures("bare")


@pytest.fixture(scope="module")
def reported(stacked, bare, home):
    """A finished study with pictures."""
    out = shutil.copytree(stacked, home / "reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", write_report)
        assert main(["study", "report", str(out)]) == 0
    return out


@pytest.fixture
def card(reported, tmp_path):
    return write_study_card(reported, tmp_path / "card").parent


def test_a_card_is_what_others_are_to_see(reported, card, tmp_path, monkeypatch):
    names = {path.name for path in card.iterdir()}
    assert names >= {"README.md", "summary.json", "summary.parquet", "runs.parquet", "spec.yaml"}
    kept = {"README.md", *names & {path.name for path in reported.iterdir()}}
    assert names - {path.name for path in (reported / "report").iterdir()} == kept
    _, front, text = (card / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["pretty_name"] == read_summary(reported)["study"]["title"]
    assert [config["config_name"] for config in metadata["configs"]] == ["default", "runs"]
    assert "license" not in metadata  # that is the author's to choose
    sections = (reported / "report/report.md").read_text().split("\n## ")
    assert [part for part in sections if part.strip() not in text and not part.startswith("Command\n")] == []
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (card / picture).is_file(), picture
    assert "It needs data" not in text  # embedded
    assert str(reported.parent) not in text + (card / "spec.yaml").read_text() + (card / "summary.json").read_text()
    spec = StudyFolder(reported).read_spec()[0]
    own = {**spec, "datasets": {"mine": {"dataset_name": "/home/me/my_photos"}}}
    monkeypatch.setattr(StudyFolder, "read_spec", lambda _: (own, ""))
    text = write_study_card(reported, tmp_path / "own").read_text()
    assert "It needs data that are not in this folder: my\\_photos. `--dataset_name` names others" in text


def test_a_study_without_a_report_has_no_card(done, tmp_path):
    for _ in range(2):
        with pytest.raises(LabError, match=re.escape(f"has no report yet. Write one with `lrlab study report {done}`")):
            write_study_card(done, tmp_path / "card")
        (done / "report").mkdir(exist_ok=True)
        (done / "report" / "report.md").touch()
        (done / "runs.parquet").unlink(missing_ok=True)
    assert not (tmp_path / "card").exists()


@cases("command, by_preset, expected", [
    ("lrlab study run warmup --out /tmp/x/mine-2 --workers 2", True, "lrlab study run warmup --out warmup --workers 2"),
    ("python training_scripts/run_study.py my.yaml --out mine", False, "lrlab study run spec.yaml --out warmup"),
    ("made by hand", False, "made by hand"),
])  # fmt: skip
def test_the_command_of_a_card_works_without_the_folders_of_its_author(command, by_preset, expected):
    assert command_of_card(command, "warmup", by_preset) == expected


def test_a_card_makes_its_own_tables(reported, card, monkeypatch, capsys):
    """Of the values of each seed: nothing else of the study is there, and the code is that of any report."""
    before = {name: (card / name).read_bytes() for name in ("summary.json", "summary.parquet", "runs.parquet")}
    for name in ("summary.json", "summary.parquet"):
        (card / name).unlink()
    monkeypatch.setattr(report, "write_report", write_report)
    assert main(["study", "report", str(card)]) == 0
    assert {name: (card / name).read_bytes() for name in before} == before
    made, there = ((path / "report" / "report.md").read_text() for path in (card, reported))
    assert made.split("## Limitations")[0] == there.split("## Limitations")[0]
    expected = records(reported)
    assert {run.id: run.results for run in read_runs(card)[0]} == {
        name: run["train"]["results"] for name, run in expected.items()
    }
    assert main(["check", str(card)]) == 0, capsys.readouterr()


def test_a_published_card_of_version_0_1_0_makes_its_statistics_again(tmp_path):
    """With its claims, speed-ups, bootstrap intervals and sentences, which this version does not make."""
    card = Path(shutil.copytree(Path(__file__).parents[2] / "model_cards" / "optimizers-shapes", tmp_path / "card"))
    before = read_summary(card)
    assert before["claims"]
    assert main(["study", "report", str(card)]) == 0
    after = read_summary(card)
    assert not {"claims", "ranks", "speedups"} & {*after}
    for gone in ("controls", "findings"):
        del before[gone]["speedup"]
    for one in itertools.chain(before["rows"], *before["controls"].values(), *before["findings"].values()):
        for gone in ("sentence", "boot_low", "boot_high"):
            one.pop(gone, None)
    for part in ("rows", "controls", "tuning", "findings", "power", "limitations"):
        assert after[part] == before[part]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beyond", "with_hot"])
def test_the_table_of_runs_has_those_that_tuned_and_diverged(request, name, tmp_path):
    out, card = request.getfixturevalue(name), tmp_path / "card"
    card.mkdir()
    for file in ("runs.parquet", "spec.yaml"):
        shutil.copyfile(out / file, card / file)
    assert main(["study", "report", str(card)]) == 0
    assert (card / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    rows = parquet.read_table(card / "runs.parquet").to_pylist()
    runs = {run["run"]["id"]: run for run in records(out).values()}
    assert {row["id"] for row in rows} == {*runs}
    for row in rows:
        run = runs[row["id"]]["run"]
        for key in ("arm", "dataset", "seed", "stage", "status", "error", "learning_rate"):
            assert row[key] == run[key]
        assert row["validation_loss_ema"] == runs[row["id"]]["train"]["results"].get("validation_loss_ema")
        assert row["training_seconds"] == runs[row["id"]]["train"]["training_seconds"]


def test_a_damaged_table_of_runs_is_said(stacked, tmp_path, capsys):
    for damaged in (b"text", (stacked / "summary.parquet").read_bytes()):  # or another table
        shutil.copyfile(stacked / "spec.yaml", tmp_path / "spec.yaml")
        (tmp_path / "runs.parquet").write_bytes(damaged)
        assert main(["study", "report", str(tmp_path)]) == 2
        assert "are damaged or do not belong together" in capsys.readouterr().err
        assert not (tmp_path / "summary.json").exists()


def test_a_metric_may_have_the_name_of_a_column_and_give_a_text(stacked, tmp_path):
    results = read_runs(stacked)[0]
    for result in results:
        result.results |= {"seed": 0.5, "frechet_features": "32 units"}  # a text, too
    write_runs(results, {"metrics": []}, tmp_path)
    again, notes = read_runs(tmp_path)
    assert [(run.seed, run.results) for run in again] == [(run.seed, run.results) for run in results]
    assert notes == {"metrics": []}


def test_runs_are_read_as_a_table(reported, card):
    frame = lab.read_study(reported)
    assert len(frame) == len(records(reported)) == 8
    for row in frame.to_dict("records"):
        record = records(reported)[row["id"]]
        assert {name: row[name] for name in ("arm", "dataset", "seed")} == {
            name: record["run"][name] for name in ("arm", "dataset", "seed")
        }
        assert row["energy_distance"] == record["train"]["results"]["energy_distance"]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "studies.md").read_text(encoding="utf-8")
    table = page.split("## The table of runs")[1].split("\n\n")[2]
    assert {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])} <= {*frame.columns}
    pandas.testing.assert_frame_equal(lab.read_study(str(card)), frame)


@pytest.fixture
def beside(home, stacked):
    """A finished study of one's own, beside its model."""
    yield shutil.copytree(stacked, home / "beside")
    shutil.rmtree(home / "beside")


def test_a_study_is_read_from_its_results_while_it_is_run(beside, tmp_path):
    frame = lab.read_study(beside)
    first, second, *_ = files = sorted(beside.glob("runs/*.json"))
    first.unlink()
    assert len(lab.read_study(beside)) == len(frame)  # as it was reported
    written = (beside / "runs.parquet").stat().st_mtime_ns + 1
    os.utime(second, ns=(written, written))
    left = frame[frame.id != first.stem].reset_index(drop=True)
    pandas.testing.assert_frame_equal(lab.read_study(beside), left)
    (beside / "runs.parquet").write_bytes(b"text")
    os.utime(beside / "runs.parquet", ns=(written, written))
    with pytest.raises(LabError, match=r"runs.parquet' has 4 bytes instead of .* Hint: restore"):
        lab.read_study(beside)
    (beside / "runs.parquet").unlink()
    second.write_text(second.read_text()[:100])
    with pytest.raises(LabError, match=f"{second.name}' is damaged. Give the command of the study again"):
        lab.read_study(beside)
    for file in files[1:]:
        file.unlink()
    with pytest.raises(LabError, match="no result in .* yet. Resume the study with `lrlab study run`"):
        lab.read_study(beside)
    with pytest.raises(LabError, match="There is no study in .*Run one with"):
        lab.read_study(tmp_path / "nothing")


def test_a_study_that_cannot_be_run_from_python(tmp_path):
    with pytest.raises(LabError, match="The dict of a study may only hold text, numbers"):
        lab.run_study({"arms": {"a": {"lr_scheduler": len}}, "datasets": ["dino"]}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_is_run_from_python(home, stacked, tmp_path, monkeypatch):
    """By a dict, as by the file that has it: numbers of numpy and tuples are taken."""
    monkeypatch.chdir(home)
    asked = {**SPEC, "seeds": np.int64(2), "datasets": ("dino", "moons")}
    page = lab.run_study(asked, str(tmp_path / "mine"), executor="stacked", quiet=True)
    assert page == tmp_path / "mine" / "report" / "index.html"
    of_file = lab.read_study(stacked)
    mine = lab.read_study(tmp_path / "mine")
    assert mine.id.tolist() == of_file.id.tolist()
    assert mine.energy_distance.tolist() == of_file.energy_distance.tolist()
    assert read_summary(tmp_path / "mine")["study"]["command"] == "lrlab study run spec.yaml --out mine --executor stacked"
