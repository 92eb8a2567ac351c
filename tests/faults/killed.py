"""Kills a training before its k-th file operation, resumes it, and compares its end with that of one never killed."""

import atexit
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import runs
import started

MODEL = {"_class_name": "MLPDenoiser", "hidden_size": 8, "num_layers": 1, "embedding_size": 4}
# Four checkpoints of which two are kept, a pipeline that is saved twice, and diagnostics in a file of their own.
OPTIONS = """--dataset_name=moons --max_train_steps=8 --checkpointing_steps=2 --checkpoints_total_limit=2 --logging_steps=1
    --save_model_epochs=1 --validation_steps=3 --timestep_sampler=loss_second_moment:history=2 --train_batch_size=500
    --num_validation_images=20 --distance_samples=0 --eval_batch_size=4 --ddpm_num_steps=4 --ddpm_num_inference_steps=2
    --log_timestep_bins=2 --cpu_threads=1 --no_preflight""".split()
LATEST = "--resume_from_checkpoint=latest"
# What may happen to the bytes of a file.
DAMAGE = {
    "bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": None,
}
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def count_and_kill(folder, at, count_file):
    """Called in the process, first: SIGKILL before its operation number `at` on files of a folder; 0 only counts them."""
    seen = 0

    def look(event, arguments):
        nonlocal seen
        if event in _CHANGES:
            relative_to_descriptor = any(isinstance(each, int) and each >= 0 for each in arguments[1:])  # as rmtree does
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            relative_to_descriptor = False
        else:
            return
        path = arguments[0]
        if relative_to_descriptor or (not isinstance(path, int) and os.fsdecode(path).startswith(folder)):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    atexit.register(lambda: Path(count_file).write_text(str(seen)))


class Case:
    """What is killed: a command in a folder that is as `before`, or does not exist."""

    def __init__(self, base, name, before=None, first=()):
        self.base, self.name, self.before, self.first = base, name, before, first
        self.count_file = base / f"{name}.count"

    def start(self, folder, at):
        """Exit status and stderr of the command, killed before operation `at`."""
        if self.before is not None:
            shutil.copytree(self.before, folder)
        before = functools.partial(count_and_kill, str(folder), at, str(self.count_file))
        command = [runs.SCRIPT, *OPTIONS, f"--model_config_name_or_path={self.base / 'config.json'}", *self.first]
        status, _, error = started.run(*command, f"--output_dir={folder}", env=runs.environment(), before=before)
        return status, error

    def count(self):
        """How many file operations there are, and where the run ended that was never killed: the same end for all cases."""
        folder = self.base / f"{self.name}-whole"
        status, error = self.start(folder, 0)
        assert status == 0, error
        assert not differences(self.base / "run-whole", folder)
        return int(self.count_file.read_text()), folder

    def killed_at(self, at, whole):
        """ "identical", "refused" or "lost" for a run that is killed before operation `at` and then goes on, and why."""
        folder = self.base / f"{self.name}-{at}"
        status, error = self.start(folder, at)
        if status != -signal.SIGKILL:
            return "lost", f"it was not killed, but ended with {status}: {error}"
        command = [runs.SCRIPT, *OPTIONS, f"--model_config_name_or_path={self.base / 'config.json'}", LATEST]
        status, _, error = started.run(*command, f"--output_dir={folder}", env=runs.environment())
        if status != 0:
            return ("refused" if status == 2 and "Traceback" not in error else "lost"), error
        differing = differences(whole, folder)
        shutil.rmtree(folder)
        return ("lost", f"other ends: {', '.join(differing)}") if differing else ("identical", "")


def differences(first, second):
    """The files that are not the same bits in two runs, but for what is about time."""
    ends = [_end_of(folder) for folder in (first, second)]
    return sorted(name for name in ends[0].keys() | ends[1].keys() if ends[0].get(name) != ends[1].get(name))


def _end_of(folder):
    end = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, content in end.items():
        if name.endswith("trainer.json"):
            end[name] = json.loads(content) | {"seconds": None, "config": None}
        elif name.endswith("run.json"):
            end[name] = json.loads(content)["run"]["status"]
        elif name.endswith(("manifest.json", "README.md", ".png", ".gif")):
            end[name] = "there"
    return end


def all_cases(base):
    """A run, one that goes on, and one that goes back."""
    (base / "config.json").write_text(json.dumps(MODEL))
    run = Case(base, "run")
    yield run
    yield Case(base, "resumed", base / "run-whole", [LATEST])
    yield Case(base, "going back", base / "run-whole", ["--resume_from_checkpoint=checkpoint-6"])


def kill_everywhere(base, seconds, seed=0, report=print):
    """
    A table of how many kills of each case had which outcome, from name to outcome to number, within so many seconds, shared
    evenly; the operations are taken in an order shuffled by `seed`.
    """
    table, cases = {}, list(all_cases(base))
    ends_at = time.monotonic() + seconds
    for left, case in zip(range(len(cases), 0, -1), cases, strict=True):
        num_operations, whole = case.count()
        until = time.monotonic() + max(0.0, ends_at - time.monotonic()) / left
        outcomes = table[case.name] = {"operations": num_operations, "cases": 0, "identical": 0, "refused": 0, "lost": 0}
        for at in random.Random(seed).sample(range(1, num_operations + 1), num_operations):
            if time.monotonic() > until and outcomes["cases"]:
                break
            outcome, why = case.killed_at(at, whole)
            outcomes["cases"] += 1
            outcomes[outcome] += 1
            if why:
                report(f"{case.name}, killed before operation {at}: {outcome}. {why}")
    return table


def as_markdown(table):
    columns = list(next(iter(table.values())))
    yield f"| case | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, outcomes in table.items():
        yield f"| {name} | {' | '.join(map(str, outcomes.values()))} |"
