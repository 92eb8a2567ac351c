"""What is done with a generated input, up to where work would start, and what must be true if it is accepted.

An input is accepted, or refused by a `LabError`. Anything else is a finding: another exception, a case that takes longer
than a minute, an option that was given and is not there.
"""

import contextlib
import json
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from fuzz import inputs

from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.study.spec.expansion import expand, expand_tuning
from diffusers_lrlab.study.spec.reading import load_spec
from diffusers_lrlab.training.arguments import parse_arguments, parse_with, read_yaml
from diffusers_lrlab.training.config import TrainingConfig, as_call
from diffusers_lrlab.training.prepare import resolve_and_check

SECONDS = 60  # that a case may take
_WRITTEN = ("run.yaml", "study.yaml")  # by this file


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
    Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return name


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
    config = parse_arguments(["--config", path], "")
    resolved = resolve_and_check(config)  # which also refuses numbers that are none any more
    for name, value in read_yaml(path, "--config").items():
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
    spec = load_spec(_write("study.yaml", text))
    expand_tuning(spec)
    expand(spec)


# Kind -> its inputs, and what is done with one.
TARGETS = {
    "argument lists": (inputs.argument_lists(), _arguments),
    "configurations": (inputs.configurations(), _configuration),
    "studies": (inputs.studies(), _study),
}


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    accepted: int = 0
    slowest: float = 0.0  # seconds
    failures: dict[str, object] = field(default_factory=dict)  # from what went wrong to the smallest input


def search(kind, count, seed, tally=None):
    """Tries so many inputs of a kind; the smallest that fails is in `tally.failures`."""
    tally = tally or Tally()
    last = []
    quiet = {"print_blob": False, "verbosity": hypothesis.Verbosity.quiet, "report_multiple_bugs": False}
    unlimited = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, **quiet, **unlimited)
    @hypothesis.given(TARGETS[kind][0])
    def each(given):
        tally.cases += 1
        started = time.monotonic()
        try:
            tally.accepted += check(kind, given)
        except BaseException as error:
            last[:] = [given]
            if isinstance(error, Hang):  # hypothesis lets it through
                raise TimeoutError(str(error)) from None
            raise
        finally:
            tally.slowest = max(tally.slowest, time.monotonic() - started)

    try:
        each()
    except Exception as error:
        if not last:
            raise  # it is the input that cannot be made
        tally.failures.setdefault(f"{type(error).__name__}: {error}"[:300], last[0])
    return tally
