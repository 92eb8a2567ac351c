"""Studies whose runs are computed by workers: made-up ones, processes, and Ray; and what happens when something dies."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from runs import TINY_UNET, environment, wait_for
from small_studies import BASE, TINY, assert_same_but_for_times, contents, records
from started import Started

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.executors import jobs, pool, worker
from diffusers_lrlab.study.executors.jobs import run_jobs
from diffusers_lrlab.study.executors.worker import Job, Outcome, share_cores

# --- jobs handed out, without any process ----------------------------------------------------------------------------


class OutOfMemoryError(Exception):
    """As Ray has one."""


class MadeUpWorker:
    """Answers with what the script has for the runs of a job, one after the other; "done" when it has no more."""

    def __init__(self, script, log):
        self.script, self.log, self.future = script, log, None

    def submit(self, job):
        specs = [spec for spec in job.specs if spec.id not in job.done]
        self.future, ids = Future(), " ".join(spec.id for spec in specs)
        self.log.append(ids)
        answers = self.script.get(ids, [])
        answer = answers.pop(0) if answers else worker.DONE
        results = [(spec, {"of": spec.id}, None) for spec in specs]
        if isinstance(answer, Exception):
            self.future.set_exception(answer)
        elif answer != "hang":
            self.future.set_result(Outcome(results if answer == worker.DONE else results[:-1], answer, "made up"))
        return self.future

    def stop(self):
        self.log.append("stopped")
        self.future.set_result(Outcome([], worker.STOPPED))

    def kill(self):
        self.log.append("killed")
        self.future.set_exception(RuntimeError("its process is gone"))


class MadeUpStudy:
    def __init__(self):
        self.kept, self.told = [], []
        self.folder = SimpleNamespace(missing=lambda specs: [spec for spec in specs if spec.id not in self.kept])
        self.progress = SimpleNamespace(log=self.told.append, advance=lambda amount, counter=None: None)

    def keep(self, spec, record, weights):
        self.kept.append(spec.id)

    def discard(self, *paths):
        pass


def handed_out(stacks, script, workers=1, begin_at_once=False):
    """What the workers were asked for, and the study, after jobs of these stacks, named by letters."""
    log, study = [], MadeUpStudy()
    pool = SimpleNamespace(workers=[MadeUpWorker(script, log) for _ in range(workers)])
    pool.begin_at_once = begin_at_once
    pool.messages = lambda: (
        [] if begin_at_once else [(job.number, "alive", None) for job in all_jobs] * 2 + [(None, "log", "a warning")] * 2
    )
    all_jobs = [Job(None, [SimpleNamespace(id=letter) for letter in stack]) for stack in stacks]
    try:
        run_jobs(iter(all_jobs), pool, study)
    except (LabError, RuntimeError) as error:
        study.error = error
    return log, study


def test_a_lost_worker_is_tried_again_and_nothing_is_kept_twice():
    log, study = handed_out(["a", "b"], {"a": [OSError("gone")], "b": [worker.STOPPED]})
    assert log == ["a", "a", "b", "b"]
    assert study.kept == ["a", "b"]
    assert study.told[:2] == ["a warning", "The run a lost its worker (OSError: gone) and is retried."]
    assert study.told.count("a warning") == 1


def test_a_run_that_kills_its_workers_is_named():
    log, study = handed_out(["a", "b"], {"b": [OSError("gone")] * 9})
    assert log == ["a", "b", "b", "b"]
    assert study.kept == ["a"]
    assert str(study.error).startswith("The run b lost its worker 3 times (OSError: gone). Finished runs are kept")


def test_what_is_done_of_a_stack_is_kept():
    script = {"a b c d e": [worker.NO_MEMORY], "a b c": [worker.NO_MEMORY], "e": [worker.NO_MEMORY]}
    log, study = handed_out(["abcde"], script)
    # What ends early in this script has all its results but the last one, which are kept.
    assert log == ["a b c d e", "e", "e"]
    assert study.kept == [*"abcde"]
    assert study.told[1] == "A stack of 5 runs ran out of memory (made up) and is retried."


def test_too_little_memory_halves_a_stack():
    script = {"a b c d": [OutOfMemoryError()], "a b": [OSError()], "b": [OSError()], "c d": [MemoryError()]}
    log, study = handed_out(["abcd"], script)
    assert log == ["a b c d", "a b", "a", "b", "b", "c d", "c", "d"]
    assert study.told[1].endswith("(OutOfMemoryError: ) and is split in two.")
    assert study.kept == [*"abcd"]


def test_a_stack_that_is_lost_twice_is_halved():
    log, study = handed_out(["abcd"], {"a b c d": [OSError(), OSError()]})
    assert log == ["a b c d", "a b c d", "a b", "c d"]
    assert study.kept == [*"abcd"]


def test_a_worker_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(jobs, "_STALL_SECONDS", -1.0)
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.0)
    log, study = handed_out(["a"], {"a": ["hang"]})
    assert log == ["a", "killed", "a"]
    assert study.told[-1].startswith("The run a hung (RuntimeError: its process is gone) and is retried")
    assert study.kept == ["a"]


def test_a_worker_that_never_begins_is_killed(monkeypatch):
    for name in ("_STALL_SECONDS", "_START_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(jobs, name, 0.0)
    log, study = handed_out(["a"], {"a": ["hang"]}, begin_at_once=True)
    assert log == ["a", "killed", "a"]
    assert study.kept == ["a"]


def test_what_fails_before_a_job_begins_is_shown_and_not_tried_again(monkeypatch):
    monkeypatch.setattr(worker, "_begin", lambda setup: json.loads("no JSON"))
    outcome = worker.do_job(worker.Setup(Path("study"), "fp32", ""), Job(None, []), lambda *_: None)
    assert outcome.ended == worker.FAILED
    assert "JSONDecodeError" in outcome.text


def test_hidden_gpus_are_none(monkeypatch):
    monkeypatch.setattr(pool.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert pool.visible_gpus() == []
    monkeypatch.setattr(pool.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    assert pool.visible_gpus() == ["3", "GPU-5f"]


@pytest.mark.parametrize(("ended", "error"), [(worker.REFUSED, LabError), (worker.FAILED, RuntimeError)])
def test_an_error_stops_the_others(ended, error):
    log, study = handed_out(["a", "b"], {"a": ["hang"], "b": [ended]}, workers=2)
    assert log == ["a", "b", "stopped"]
    assert isinstance(study.error, error)
    assert "made up" in str(study.error)


def test_cores_are_shared_out(monkeypatch):
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
    "frechet_samples": 0,
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

    def run(self, *options):
        process = self.start(*options)
        shown, error = process.communicate()
        assert process.returncode == 0, error
        assert "Traceback" not in error
        self.check_that_all_have_ended()
        return shown

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
    study = Study(tmp_path / "study")
    (study.folder / "die").touch()
    shown = study.run(f"--executor={executor}", "--workers=2", "--stack_size=1")
    assert_same_but_for_times(one_by_one.out, study.out)
    assert "lost its worker" in shown
    assert (study.folder / "die-done").exists()
    assert len(one_by_one.updates()) == 80
    # From the checkpoint of update 10, or from the start if the thread that writes it was not done with it.
    assert len(study.updates()) in (80 + 6, 80 + 16)
    assert not [*study.out.glob("local"), *study.out.rglob(".tmp*")]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pool", RAY])
def test_stacks_without_memory_are_halved_and_those_that_hang_go_on(tmp_path, executor):
    changes = {"datasets": {"dino": POINTS}, "seeds": 2}
    undisturbed, study = Study(tmp_path / "undisturbed", **changes), Study(tmp_path / "study", **changes)
    undisturbed.run("--executor=stacked", "--stack_size=2")
    for name in ("small", "hang"):
        (study.folder / name).touch()
    shown = study.run(f"--executor={executor}", "--workers=1")
    assert "A stack of 4 runs ran out of memory ([enforce fail" in shown
    assert "A stack of 2 runs hung (" in shown
    assert_same_but_for_times(undisturbed.out, study.out)
    assert [record["run"]["executor"]["members"] for record in records(study.out).values()] == [2] * 4
    assert study.updates() == ["4"] * 4 + ["2"] * (80 + 2)


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


def commands_of_children(pid):
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended, as those do that ask for the machine's facts
            yield " ".join(child.cmdline())


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_workers_end_with_a_study_that_is_killed_before_their_first_job(tmp_path, seconds):
    study = Study(tmp_path / "study")
    process = study.start("--executor=pool", "--workers=2", "--stack_size=1")
    wait_for(lambda: any("spawn_main" in command for command in commands_of_children(process.pid)), process)
    time.sleep(seconds)  # while it imports
    process.kill()
    process.communicate()
    study.check_that_all_have_ended(within=120.0)  # after imports, which take long on a busy machine


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_what_a_lost_node_did_is_done_by_another(one_by_one, tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    study = Study(tmp_path / "study")
    for name, value in {**NOT_NICE, "LRLAB_FAULTS": str(study.folder)}.items():  # of the nodes' processes
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        process = study.start("--executor=ray", f"--address={cluster.address}", "--stack_size=1")
        wait_for(lambda: len(study.updates()) > 5, process)
        cluster.remove_node(node, allow_graceful=False)
        shown, error = process.communicate()
    finally:
        cluster.shutdown()
    assert process.returncode == 0, error
    assert "lost its worker" in shown
    study.check_that_all_have_ended()
    assert_same_but_for_times(one_by_one.out, study.out)
