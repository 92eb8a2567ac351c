"""What is done with a generated input, up to where work would start, and what must be true if it is accepted.

An input is accepted, or refused by a `LabError`. Anything else is a finding: another exception, a case that takes longer
than a minute, an option that was given and is not there.
"""

import contextlib
import json
import signal
import tempfile
import warnings
from pathlib import Path

import yaml
from continued_runs import repeated_options
from fuzz import inputs
from hypothesis import strategies as st

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.hub.records import read_log
from diffusers_lrlab.run.check import check_folder
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.arguments import parse_arguments, parse_with, read_yaml
from diffusers_lrlab.training.config import TrainingConfig, as_call
from diffusers_lrlab.training.prepare import resolve_and_check
from diffusers_lrlab.training.resume import check_fresh
from diffusers_lrlab.training.run_folder import RunFolder

FIXTURE = Path(__file__).parents[1] / "compatibility" / "v0.1.0"
SECONDS = 60  # that a case may take
_WRITTEN = ("run.yaml", "study.yaml", "run.json", "metrics.jsonl")  # by this file


class Hang(BaseException):
    """A case takes too long."""


@contextlib.contextmanager
def _at_most(seconds):
    def stop(*_):
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(kind, given, seconds=SECONDS):
    """Whether an input is accepted; raises what a user must never see."""
    refused, status = None, 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _at_most(seconds), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            TARGETS[kind][1](given)
        except LabError as error:
            refused = str(error)
        except SystemExit as end:  # as --help does
            status = end.code
        assert refused is None or 0 < len(refused.strip()) < 4000, f"an error of {len(refused)} characters"
        assert not status, f"exit status {status}"
        left = [path for path in Path(folder).rglob("*") if path.name not in _WRITTEN and path.is_file()]
        assert not left, f"{left} were written"
    return refused is None


def _write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def _arguments(given):
    config, settings = parse_with(given, "", FinderConfig)
    settings.check()
    _check_repeated(config, resolve_and_check(config))


def _check_repeated(config, resolved):
    """What is recorded as the call of a run asks for the same run."""
    again = resolve_and_check(eval(as_call(config), {"train": lambda config: config, "TrainingConfig": TrainingConfig}))
    assert again == resolved, "the recorded call asks for another run"


def _configuration(text):
    path = _write("run.yaml", text)
    config = parse_arguments(["--config", str(path)], "")
    resolved = resolve_and_check(config)  # which also refuses numbers that are none any more
    for name, value in read_yaml(str(path), "--config").items():
        taken = getattr(config, name)
        texts = {value} if isinstance(value, str) else {str(value), json.dumps(value), repr(value)}
        taken_as = {str(taken), json.dumps(taken), repr(taken)} | ({f"{taken:g}"} if isinstance(taken, float) else set())
        same = taken == value or texts & taken_as or _number_in(value) == taken or name == "learning_rate"
        assert same or isinstance(taken, bool) or name == "mixed_precision", f"{name} is {taken!r} instead of {value!r}"
    _check_repeated(config, resolved)


def _number_in(value):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return None


def _study(text):
    spec = load_spec(str(_write("study.yaml", text)))
    expand_tuning(spec)
    expand(spec)


def _record(text):
    _write("lrlab/run.json", text)
    check_folder(Path())
    for overwrite in (False, True):
        with contextlib.suppress(LabError):
            check_fresh(RunFolder(Path()), overwrite)
    path = _write("run.yaml", yaml.safe_dump(repeated_options(Path())))
    resolve_and_check(parse_arguments(["--config", str(path), "--output_dir", "again"], ""))


def _log(text):
    folder = RunFolder(_logged(text))
    folder.rewind(folder, 2, 1)
    rows = read_log(_logged(text))
    assert all(isinstance(row["update"], int) for row in rows)


def _logged(text):
    return _write("lrlab/metrics.jsonl", text).parents[1]


_RECORD = json.loads((FIXTURE / "run/lrlab/run.json").read_text(encoding="utf-8"))
_ROW = {"update": 1, "loss": 0.5, "lr": 1e-3, "beta1": 0.9, "grad_norm": 0.1}
# Kind -> its inputs, and what is done with one.
TARGETS = {
    "argument lists": (inputs.argument_lists(), _arguments),
    "configurations": (inputs.configurations(), _configuration),
    "studies": (inputs.studies(), _study),
    "records": (inputs.damaged_json(_RECORD), _record),
    "logs": (st.lists(inputs.damaged_json(_ROW), max_size=4).map("\n".join), _log),
}
