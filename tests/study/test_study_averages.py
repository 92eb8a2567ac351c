"""Studies of runs with several averages: the first one is measured, and the others stay for `lrlab ema`, as do snapshots."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from small_studies import HOT, ONE, records, study, write_spec

from diffusers_lrlab.averaging.snapshots import read_snapshots
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.study.executors import worker
from diffusers_lrlab.study.executors.local import run_local
from diffusers_lrlab.study.runs.context import StudyContext
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning
from diffusers_lrlab.study.spec.reading import load_spec

pytestmark = pytest.mark.usefixtures("bare")

FIRST = "constant:decay=0.9"
SEVERAL = {"ema": f"{FIRST}|posthoc:sigma_rels=[0.1|0.2],snapshots=3|constant:decay=0.5"}
ARMS = {"one": {"ema": FIRST}, "several": SEVERAL}
EMAS = {**ONE, "arms": ARMS, "metrics": ["energy_distance", "validation_loss_ema", "validation_loss"]}


@pytest.fixture(scope="module", params=["stacked", "local"])
def averaged(request, home):
    return study(home, home / f"averaged-{request.param}", f"--executor={request.param}", **EMAS)


def kept_in(folder):
    (run,) = (folder / "averages").iterdir()
    return run


def weights(folder):
    return load_file(folder / "denoiser" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_the_first_average_is_measured_and_the_others_stay(averaged):
    one, several = (records(averaged)[name] for name in sorted(records(averaged)))
    assert one["train"]["results"] == several["train"]["results"]
    run = kept_in(averaged)
    assert run.name == several["run"]["id"]
    assert [(one.update, one.end, one.sigma_rels) for one in read_snapshots(run / "ema_snapshots")] == [
        (update, update, [0.1, 0.2]) for update in (10, 20, 30)
    ]
    measured = load_file(averaged / "weights" / f"{run.name}.safetensors")
    assert all(torch.equal(value, measured[name]) for name, value in weights(run).items())
    beside = weights(run / "lrlab" / "averages" / "3")
    assert not torch.equal(beside["output.bias"], measured["output.bias"])


def test_the_folder_of_a_study_is_no_run(averaged, tmp_path, capsys):
    assert main(["ema", str(averaged), "--sigma_rel=0.1", f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert "must be the folder of a run, got that of a study" in error
    assert f"give a run whose averages it keeps, such as '{kept_in(averaged)}'" in error


def test_a_member_of_a_stack_keeps_what_a_run_by_itself_does(home, averaged):
    runs = [kept_in(home / f"averaged-{name}") for name in ("stacked", "local") if (home / f"averaged-{name}").exists()]
    files = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in runs]
    assert files[0] == files[-1]
    for name in (name for name in files[0] if name.endswith(".safetensors")):
        pair = [load_file(run / name) for run in runs]
        torch.testing.assert_close(pair[0], pair[-1], rtol=0, atol=1e-5)


def test_lrlab_ema_makes_and_measures_widths_of_a_run_of_a_study(averaged, tmp_path, capsys):
    run, out = kept_in(averaged), tmp_path / "out"
    assert main(["ema", str(run), "--sigma_rel", "0.2", "--out", str(out)]) == 0
    stored = load_file(run / "ema_snapshots" / "update-00000030" / "averages.safetensors")
    for name, value in weights(out).items():
        torch.testing.assert_close(value, stored[f"0.2/{name}"])
    assert main(["ema", str(run), "--sweep", "--num", "2", "--out", str(tmp_path / "best")]) == 0
    results = records(averaged)[run.name]["train"]["results"]
    sweep = json.loads((tmp_path / "best" / "average.json").read_text())["sweep"]
    assert sweep["of_run"] == pytest.approx(results["validation_loss_ema"], rel=1e-5)
    assert main(["ema", str(averaged), "--sigma_rel", "0.2", "--out", str(tmp_path / "none")]) == 2


def test_they_are_checked_with_the_study(averaged, tmp_path, capsys):
    copy = shutil.copytree(averaged, tmp_path / "copy")
    assert main(["check", str(copy)]) == 0
    damaged = kept_in(copy) / "ema_snapshots" / "update-00000020" / "averages.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["check", str(copy)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"averages/several--dino--0--\w+: ema_snapshots/update-00000020: ", said)
    assert f"remove runs/{kept_in(copy).name}.json" in said


def test_what_is_measured_and_kept_is_said_before_the_study(home, capsys):
    assert main(["study", "run", str(write_spec(home, **EMAS)), "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "Averages of several: the first one of each run is measured" in said
    assert "the snapshots of 1 run stay in averages/, for lrlab ema. They take 1 MiB" in said


def test_runs_that_choose_a_rate_take_no_snapshots(home, tmp_path):
    """They keep the measured average alone, and their results are those of an arm that has no other."""
    tune = {"factors": [1.0], "seeds": [9], "metric": "validation_loss_ema", "extensions": 0}
    spec = load_spec(write_spec(home, **EMAS, tune=tune))
    context = StudyContext(StudyFolder(tmp_path), quiet=True)
    one, several = (context.plan(run)[0].config for run in expand_tuning(spec))
    assert several.ema == one.ema
    assert [run.keeps_averages for run in (*expand_tuning(spec), *expand(spec))] == [False, False, False, True]


def test_a_diverged_run_keeps_nothing(home, tmp_path):
    for executor in ("stacked", "local"):
        arms = {"one": {}, "hot": {**HOT, **SEVERAL}}
        out = study(home, tmp_path / executor, f"--executor={executor}", **{**EMAS, "arms": arms})
        assert not list((out / "averages").glob("*"))


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_folder_sends_them(home, averaged, tmp_path):
    spec = next(run for run in expand(load_spec(write_spec(home, **EMAS))) if run.arm == "several")
    outcome = worker.do_job(worker.Setup(tmp_path / "elsewhere", "fp32", ""), worker.Job(run_local, [spec]), lambda *_: None)
    assert outcome.ended == worker.DONE, outcome.text
    (result,) = outcome.results
    study = StudyContext(StudyFolder(tmp_path / "here"), quiet=True)
    study.keep(*result)
    sent = kept_in(tmp_path / "here")
    assert [one.update for one in read_snapshots(sent / "ema_snapshots")] == [10, 20, 30]
    assert main(["check", str(sent)]) == 0
