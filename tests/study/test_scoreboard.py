"""The scoreboard of claims: its file is what the cards say, and what the command shows."""

import importlib
import json
import shutil

import printed
import pytest

from diffusers_lrlab.cli.main import main
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study import scoreboard
from diffusers_lrlab.study.analysis.claims import VERDICTS
from diffusers_lrlab.study.analysis.scoreboard import NOT_RUN, collect

CARDS = printed.ROOT / "model_cards"


@pytest.fixture(scope="module")
def studies():
    return scoreboard.read_scoreboard()


def test_the_file_is_what_the_cards_say():
    with printed.docs_modules():
        text = importlib.import_module("generated").scoreboard_text()
    assert text == scoreboard.FILE.read_text(encoding="utf-8"), "out of date: run python docs/generated.py"


def test_every_claim_has_a_verdict_of_three_words_at_most(studies):
    claims = [claim for study in studies for claim in study["claims"]]
    tested = [claim for claim in claims if claim["verdict"] != NOT_RUN]
    assert len(tested) >= 12
    assert {claim["verdict"] for claim in tested} <= {*VERDICTS}
    assert all(len(claim["verdict"].split()) <= 3 for claim in claims)
    assert any(claim["verdict"] == "not supported" for claim in tested)
    assert all(study["claims"] for study in studies)


def test_margins_are_the_same_for_all_claims(studies):
    """So that none was chosen to fit a result."""
    for study in studies:
        for claim in study["claims"]:
            assert claim["within"] in (None, 0.01 if "loss" in claim["metric"] else 0.05), claim["claim"]


def test_effects_are_those_of_the_card(studies):
    (study,) = (study for study in studies if study["name"] == "optimizers")
    rows = json.loads((CARDS / "optimizers-2d" / "summary.json").read_text())["rows"]
    mean = {row["arm"]: row["mean"] for row in rows if (row["dataset"], row["metric"]) == ("dino", "validation_loss_ema")}
    muon = study["claims"][0]["datasets"][0]
    assert muon["effect"] == pytest.approx(mean["muon"] / mean["adamw"] - 1, rel=1e-4)
    assert study["changed"] == []


def copied(tmp_path, name="warmup-2d"):
    shutil.copytree(CARDS / name, tmp_path / name)
    return tmp_path / name


def test_a_preset_without_a_card_is_not_run_yet(tmp_path):
    copied(tmp_path)
    found = {study["name"]: study for study in collect(tmp_path)}
    assert found["warmup"]["card"] == f"{tmp_path.name}/warmup-2d"
    assert {claim["verdict"] for claim in found["horizons"]["claims"]} == {NOT_RUN}


def test_a_preset_that_was_another_when_its_card_was_written_says_what_has_changed(tmp_path):
    file = copied(tmp_path) / "spec.yaml"
    text = file.read_text()
    assert "max_train_steps: 3000" in text
    file.write_text(text.replace("max_train_steps: 3000", "max_train_steps: 1000"))
    (study,) = (study for study in collect(tmp_path) if study["name"] == "warmup")
    assert study["changed"] == ["base"]


def test_a_card_without_the_comparison_is_an_error(tmp_path):
    card = copied(tmp_path)
    text = (card / "summary.json").read_text()
    (card / "summary.json").write_text(text.replace('"5-percent@0.003"', '"another"'))
    with pytest.raises(LabError, match="'warmup-2d' does not compare 5-percent@0.003 with none@0.0003 by kl"):
        collect(tmp_path)


def test_the_command_lists_them_from_the_package_alone(capsys, studies):
    assert main(["list", "claims", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"claims": studies}
    assert main(["list", "claims"]) == 0
    text = capsys.readouterr().out
    for study in studies:
        assert study["command"] in text
        for claim in study["claims"]:
            assert f"{claim['verdict']:<22}{claim['claim']} ({claim['source']})" in text
            assert all(each["text"] in text for each in claim["datasets"])
    assert main(["list", "claims", "--markdown"]) == 0
    assert scoreboard.overview(studies) in capsys.readouterr().out


def test_a_narrow_terminal_wraps(studies):
    lines = scoreboard.as_text(studies, 80).splitlines()
    assert max(len(line) for line in lines if line.startswith(" " * 20)) <= 80


def test_a_misspelt_kind_is_named(capsys):
    assert main(["list", "claim"]) == 2
    assert "Did you mean 'claims'?" in capsys.readouterr().err
