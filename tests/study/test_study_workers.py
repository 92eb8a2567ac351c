"""Studies whose runs are computed by workers: made-up ones, processes, and Ray; and what happens when something dies."""

import json
import os
import pickle
import signal
import time
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from runs import TINY_UNET, environment, wait_for
from small_studies import BASE, TINY, assert_same_but_for_times, contents
from started import Started
from tables import rows

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study import workers
from diffusers_lrlab.study.workers import Job, run_jobs, share_cores

# --- jobs handed out, without any process ----------------------------------------------------------------------------


class MadeUpWorkers:
    """Answers with what the script has for the runs of a job: an error, none, or nothing at all."""

    def __init__(self, script, done):
        self.script, self.done, self.log = script, done, []

    def submit(self, job):
        ids, future = "".join(spec.id for spec in job.specs), Future()
        self.log.append(ids)
        answer = self.script.get(ids)
        if isinstance(answer, OSError):
            future.set_exception(answer)
        elif answer != "never":
            future.set_result(answer)
            self.done.update(ids)
        return future

    def stop(self):
        self.log.append("stopped")


def handed_out(stacks, script):
    """The log of the workers, and the updates and runs that the bars count, after jobs of these stacks, named by letters."""
    specs = {letter: SimpleNamespace(id=letter, config=SimpleNamespace(max_train_steps=10)) for letter in "".join(stacks)}
    done, shown = set(), []
    folder = SimpleNamespace(
        missing=lambda specs: [spec for spec in specs if spec.id not in done],
        run_file=lambda run_id: SimpleNamespace(exists=lambda: run_id in done),
    )
    progress = SimpleNamespace(advance=shown.append, finished=lambda spec: shown.append(spec.id))
    workers = MadeUpWorkers(script, done)
    try:
        all_jobs = [Job(None, [specs[letter] for letter in stack]) for stack in stacks]
        run_jobs(all_jobs, workers, SimpleNamespace(folder=folder, progress=progress))
    except (LabError, RuntimeError) as error:
        return workers.log, shown, error
    return workers.log, shown, None


def test_finished_runs_are_counted():
    assert handed_out(["ab", "c"], {}) == (["ab", "c"], [10, "a", 10, "b", 10, "c"], None)


KEPT = ". Finished runs are kept. "
AGAIN = f"{KEPT}Give the same command again, with fewer --workers or a smaller --stack_size if memory is short."


@rows("answer, kind, text", [
    (OSError("gone\nfor good"), LabError, "A worker was lost (OSError: gone)" + AGAIN),
    (LabError("no such thing"), LabError, "no such thing"),
    (RuntimeError("A worker failed:\nTraceback"), RuntimeError, "A worker failed:\nTraceback"),
])  # fmt: skip
def test_an_error_stops_the_others(answer, kind, text):
    log, _, error = handed_out(["a", "b"], {"a": "never", "b": answer})
    assert log == ["a", "b", "stopped"]
    assert (type(error), str(error)) == (kind, text)


def test_how_a_job_ends_is_returned(monkeypatch, tmp_path):
    """Errors as those that can be pickled."""

    def outcome(execute=None):
        error = pickle.loads(pickle.dumps(workers.do_job(workers.Setup(tmp_path, ""), Job(execute, []))))
        return type(error), "" if error is None else str(error)

    nodes = f"--out {str(tmp_path)!r}: every node needs this folder. Give one on a shared disk."
    assert outcome() == (LabError, nodes)
    (tmp_path / "spec.yaml").touch()
    monkeypatch.setattr(workers, "_begin_study", lambda setup: json.loads("no JSON"))
    kind, text = outcome()
    assert (kind, text.startswith("A worker failed:\nTraceback"), "JSONDecodeError" in text) == (RuntimeError, True, True)
    monkeypatch.setattr(workers, "_begin_study", lambda setup: SimpleNamespace(device=torch.device("cpu")))

    def without_memory(specs, study):
        raise RuntimeError("can't allocate memory\nhere")

    def interrupted(specs, study):
        signal.raise_signal(signal.SIGTERM)

    assert outcome(without_memory) == (LabError, "A worker ran out of memory (can't allocate memory)" + AGAIN)
    assert outcome(lambda specs, study: None) == (type(None), "")
    monkeypatch.setattr(workers, "_is_stopped", False)  # and so again afterwards
    assert outcome(interrupted) == (LabError, "A worker got signal 15" + AGAIN)
    assert outcome() == (LabError, "A worker was stopped" + AGAIN)


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(workers.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    assert workers.visible_gpus() == ["3", "GPU-5f"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert share_cores(None, 8, 0) == (8, 1)
    assert share_cores(3, 8, 0) == (3, 2)
    assert share_cores(None, 8, 4) == (4, 2)
    assert share_cores(4, 2, 0) == (4, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert share_cores(None, 8, 0) == (2, 4)


# --- real ones -------------------------------------------------------------------------------------------------------

SCRIPTS = Path(__file__).parents[1] / "scripts"
RAY = pytest.param("ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"))
NOT_NICE = {"RAY_worker_niceness": "0"}  # Ray's workers give way to whatever else a busy machine does, for minutes
POINTS = {"dataset_name": "dino", "model_config_name_or_path": "tiny", "distance_samples": 200}
DIGITS = {
    "dataset_name": "digits",
    "model_config_name_or_path": "unet",
    "train_batch_size": 4,
    "num_validation_images": 8,
    "distance_samples": 0,
    "num_inference_steps": 2,
}


class Study:
    """A folder with a small study, and what goes wrong with it."""

    def __init__(self, folder, **changes):
        self.folder, self.out = folder, folder / "out"
        for name, model in (("tiny", TINY), ("unet", TINY_UNET)):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(model))
        spec = {
            "base": {key: value for key, value in BASE.items() if key not in POINTS} | {"max_train_steps": 20},
            "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine"}},
            "datasets": {"dino": POINTS, "digits": DIGITS},
            "seeds": 1,
            "metrics": ["validation_loss_ema"],
            "evaluation_points": 2,
            **changes,
        }
        (folder / "study.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    def start(self, *options):
        arguments = ("study.yaml", "--out=out", f"--import={SCRIPTS / 'faults_of_workers.py'}", *options)
        env = {**environment(), **NOT_NICE, "LRLAB_FAULTS": str(self.folder)}
        return Started(SCRIPTS / "study_driver.py", "study", "run", *arguments, env=env, cwd=self.folder)

    def run(self, *options, status=0):
        process = self.start(*options)
        shown, error = process.communicate()
        assert process.returncode == status, error
        assert "Traceback" not in error
        self.check_that_all_have_ended()
        return shown if status == 0 else error

    def check_that_all_have_ended(self, within=30.0):
        deadline = time.monotonic() + within
        while left := [process for process in psutil.process_iter() if self._is_of_it(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def _is_of_it(self, process):
        try:
            is_ours = process.environ().get("LRLAB_FAULTS") == str(self.folder)
            # Not the server that processes of tests are forked from, which the first of them has started.
            return is_ours and process.status() != psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
        except psutil.Error:
            return False

    def updates(self):
        file = self.folder / "updates"
        return file.read_text().split() if file.exists() else []


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    study = Study(tmp_path_factory.mktemp("reference") / "study")
    study.run("--executor=local")
    return study


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", RAY])
def test_a_killed_worker_leaves_the_files_of_local(one_by_one, tmp_path, executor):
    """The same command goes on, to the same bits; Ray itself repeats the job."""
    study, options = Study(tmp_path / "study"), (f"--executor={executor}", "--workers=2", "--stack_size=1")
    (study.folder / "die").touch()
    if executor == "pool":
        error = study.run(*options, status=2)
        assert "A worker was lost (BrokenProcessPool" in error
        assert "Give the same command again" in error
    study.run(*options)
    assert_same_but_for_times(one_by_one.out, study.out)
    assert (study.folder / "die-done").exists()
    assert len(one_by_one.updates()) == 80
    # From the checkpoint of update 10, or from the start if the thread that writes it was not done with it; the other run
    # of the pool was stopped after whole updates.
    assert 80 + 6 <= len(study.updates()) <= 80 + 16
    assert not [*study.out.glob("local"), *study.out.rglob(".tmp*")]


def has_gone_on(out, begun):
    return any(out.glob("local/*/checkpoint-*")) and len(contents(out)) > begun


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", RAY])
def test_stopped_and_killed_it_goes_on_by_the_same_command(one_by_one, tmp_path, executor):
    study, options = Study(tmp_path / "study"), (f"--executor={executor}", "--workers=2", "--stack_size=1")
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = study.start(*options)
        wait_for(partial(has_gone_on, study.out, len(contents(study.out))), process)
        process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode == status, error
        assert ("The same command resumes the study" in error) == (status == 130)
        assert "Traceback" not in error
        study.check_that_all_have_ended()
    study.run(*options)
    assert_same_but_for_times(one_by_one.out, study.out)
