"""A small study, run in this process, and its files."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from runs import environment
from started import Started

import diffusers_lrlab.study.report.report as report
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.study.stacked.stack import Stack
from diffusers_lrlab.training.trainer import Trainer

DRIVER = Path(__file__).parent / "scripts" / "study_driver.py"
TINY = {"_class_name": "MLPDenoiser", "dimension": 2, "hidden_size": 16, "embedding_size": 8, "num_layers": 1}
BASE = {
    "model_config_name_or_path": "tiny",
    "max_train_steps": 30,
    "train_batch_size": 16,
    "num_validation_images": 200,
    "distance_samples": 200,
    "ddpm_num_steps": 10,
    "lr_warmup_steps": 0,
    "learning_rate": 1e-3,
    "checkpointing_steps": 10,
}
SPEC = {
    "title": "Of a test",
    "base": BASE,
    "arms": {"constant": {"lr_scheduler": "constant"}, "cosine": {"lr_scheduler": "cosine", "description": "half a cosine"}},
    "datasets": ["dino", "moons"],
    "seeds": 2,
    "metrics": ["energy_distance", "validation_loss_ema"],
    "evaluation_points": 3,
}
ONE = {"datasets": ["dino"], "seeds": 1}
HOT = {"lr_scheduler": "constant", "learning_rate": 1e30}  # diverges at once
write_report = report.write_report
BEYOND = {**ONE, "tune": {"factors": [0.1, 0.3], "seeds": [10], "metric": "validation_loss_ema", "extensions": 5}}
BEYOND |= {"metrics": ["validation_loss_ema"]}


@contextlib.contextmanager
def without_report():
    """No threads besides this one, and no report; yields the patch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.setattr(report, "write_report", lambda folder, *_: folder / "report" / "index.html")
        yield patch


def write_spec(home, **changes):
    """The file of the small study, with other keys."""
    text = yaml.safe_dump({key: value for key, value in {**SPEC, **changes}.items() if value is not None}, sort_keys=False)
    path = home / "study.yaml"
    path.write_text(text)
    return path


def study(home, out, *options, status=0, **changes):
    """Runs a study by its command, in this process."""
    assert main(["study", "run", str(write_spec(home, **changes)), f"--out={out}", *options]) == status
    AcceleratorState._reset_state(reset_partial_state=True)
    return out


def records(folder):
    """The results, by file name; none of them holds a number that is not JSON's."""

    def refuse(text):
        raise AssertionError(text)

    files = sorted((folder / "runs").glob("[!.]*.json"))  # not what a killed process was writing
    return {file.stem: json.loads(file.read_text(), parse_constant=refuse) for file in files}


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


def contents(folder):
    """Every file of the runs with its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("runs/[!.]*"))}


def moments(folder):
    return {name: (folder / name).stat().st_mtime_ns for name in contents(folder)}


_TIMES = {"started", "ended", "hours", "seconds", "training_seconds", "sampling_seconds", "evaluation_seconds"}
_TIMES |= {"sha256"}  # of all of a record, and so of these


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in _TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same_but_for_times(one, other):
    """The same files, to the byte; those that hold times without these."""
    first, second = contents(one), contents(other)
    assert list(first) == list(second)
    for name in first:
        if name.endswith(".json"):
            texts = [json.dumps(without_times(json.loads(files[name]))) for files in (first, second)]
            assert texts[0] == texts[1], name
        else:
            assert first[name] == second[name], name
    summaries = [without_times(read_summary(folder)) for folder in (one, other)]
    for summary in summaries:
        del summary["study"]["command"]
    assert summaries[0] == summaries[1]


@contextlib.contextmanager
def started(home, out, *options, **changes):
    """A study in a process of its own."""
    process = Started(DRIVER, "study", "run", write_spec(home, **changes), f"--out={out}", *options, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def counted_updates():
    """Yields a list that grows by one with every update that is computed, of a stack or of a run by itself."""
    updates = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Stack, Trainer):

            def do_update(self, *inputs, original=kind.do_update):
                updates.append(1)
                return original(self, *inputs)

            patch.setattr(kind, "do_update", do_update)
        yield updates
