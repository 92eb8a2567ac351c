"""What the schedules of other trainers really do: their own functions, audited by `lrlab audit`.

    python benchmarks/other_trainers.py sd-scripts PATH/sd-scripts --out DIR

HOST is one of sd-scripts, musubi-tuner, simpletuner, ai-toolkit, onetrainer, diffusion-pipe, diffsynth-studio. Each row sets
options of the trainer, takes its scheduler function out of the checkout, and trains a tiny model in the trainer's loop (see
host_loops.py) under the audit, which compares each update with the schedule that the options' names promise. It prints a
table, and draws DIR/HOST.png.
"""

import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import common
import numpy as np

from diffusers_lrlab.audit.result import Expectation
from diffusers_lrlab.audit.run import AuditOptions, run_audited
from diffusers_lrlab.core.plotting import BLUE, DARK, GREY, ORANGE, new_figure, plain_axes, save_figure

COMMITS = {
    "sd-scripts": "48d368f",
    "musubi-tuner": "30c658c",
    "simpletuner": "bc8e6ab",
    "ai-toolkit": "27a03a9",
    "onetrainer": "23df383",
    "diffusion-pipe": "8f83dbf",
    "diffsynth-studio": "fed7b18",
}
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
CLOSE = 1e-3  # of the peak: the schedule that was asked for, but for its rounding or its last digits
LOOPS = Path(__file__).with_name("host_loops.py")


@dataclass(frozen=True)
class Row:
    """Options of a trainer, and the schedule that their names promise."""

    asked: str  # as its users write it
    options: dict
    expect: str = "cosine"
    warmup: int = 0  # updates
    updates: int = 200
    accumulation: int = 1
    processes: int = 1
    lr: float = 1e-4
    counted: int | None = None  # updates of the promised schedule, if not as many
    more: dict = field(default_factory=dict)  # `train` updates, or `stop_at` an update and `then` resume with other options

    def as_json(self):
        given = {"updates": self.updates, "accumulation": self.accumulation, "processes": self.processes, "lr": self.lr}
        return json.dumps({**given, "options": self.options, **self.more})

    @property
    def expectation(self):
        then = self.more.get("then", {})
        return Expectation(
            self.expect, self.counted or then.get("updates", self.updates), self.warmup, then.get("lr", self.lr)
        )


def _kohya(name, warmup=0, **more):
    return {"lr_scheduler": name, "lr_warmup_steps": warmup} | {f"lr_{key}": value for key, value in more.items()}


def _toolkit(name, params=None, **options):
    return {"lr_scheduler": name, "lr_scheduler_params": params or {}, **options}


def _one(name, warmup=0, **options):
    return {"name": name, "warmup_steps": warmup, **options}


def _pipe(name, warmup=0):
    return {"lr_scheduler": name, "warmup_steps": warmup}


WSD = _kohya("warmup_stable_decay", 20, decay_steps=40)
RESTARTS = _kohya("cosine_with_restarts", scheduler_num_cycles=3)
HALF_RATE = {"stop_at": 80, "then": {"lr": 5e-5}}
TWICE = {"stop_at": 200, "then": {"updates": 400}}
KOHYA = (
    Row("linear, warm-up 20", _kohya("linear", 20), "linear", 20),
    Row("cosine, warm-up 20, accumulation 4", _kohya("cosine", 20), warmup=20, accumulation=4),
    Row("cosine, warm-up 0.1, 4 processes", _kohya("cosine", 0.1), warmup=20, processes=4),
    Row("cosine, warm-up 20, 4 processes", _kohya("cosine", 20), warmup=20, processes=4),
    Row("linear, resumed at 80 with half the rate", _kohya("linear"), "linear", more=HALF_RATE),
)
BY_CLASS = {"lr_scheduler_type": "CosineAnnealingLR", "lr_scheduler_args": ["T_max=200"], "lr_warmup_steps": 20}
REX = "rex:d=0.9,min_lr_ratio=0.01"
REX_WITH_WARMUP = f"{REX},warmup_start_ratio=0.01"
COSINE_TO_END = "cosine:min_lr=4e-7"  # the default of SimpleTuner's lr_end
POLYNOMIAL = "polynomial:power=0.8,lr_end=4e-7"
LINEAR = {
    "class": "diffusers_lrlab.get_linear_schedule",
    "params": [{"key": "num_training_steps", "value": "%SCHEDULER_STEPS%"}],
}
HARD = "cosine_with_restarts:num_cycles=3"
ROWS = {
    "sd-scripts": [
        *KOHYA,
        Row("constant, warm-up 20", _kohya("constant", 20), "constant"),
        Row("constant_with_warmup, 20", _kohya("constant_with_warmup", 20), "constant_with_warmup", 20),
        Row("warmup_stable_decay, 20, decay 40", WSD, "wsd:num_decay_steps=40", 20),
        Row("the same, 4 processes", WSD, "wsd:num_decay_steps=40", 20, processes=4),
        Row("cosine_with_restarts, 3 cycles", RESTARTS, HARD),
        Row("linear, 200 updates, resumed for 400", _kohya("linear"), "linear", more=TWICE),
    ],
    "musubi-tuner": [
        *KOHYA,
        Row("rex", _kohya("rex"), REX),
        Row("rex, warm-up 100 of 1,000", _kohya("rex", 100), REX_WITH_WARMUP, 100, 1000),
        Row("rex, warm-up 500 of 1,000", _kohya("rex", 500), REX_WITH_WARMUP, 500, 1000),
        Row("CosineAnnealingLR by class, warm-up 20", BY_CLASS, warmup=20),
    ],
    "simpletuner": [
        Row("cosine, warm-up 500 of 1,800", _kohya("cosine", 500), COSINE_TO_END, 500, 1800),
        Row("cosine, warm-up 200 of 12,000", _kohya("cosine", 200), COSINE_TO_END, 200, 12_000),
        Row("cosine, warm-up 400,000", _kohya("cosine", 400_000), COSINE_TO_END, updates=2000),
        Row("cosine_with_restarts, warm-up 100", _kohya("cosine_with_restarts", 100), f"{HARD},min_lr=4e-7", 100, 400),
        Row("sine, warm-up 100", _kohya("sine", 100), COSINE_TO_END, 100, 400),
        Row("polynomial, warm-up 20, 2 processes", _kohya("polynomial", 20), POLYNOMIAL, 20, processes=2),
        Row("linear, warm-up 20, 4 processes", _kohya("linear", 20), "linear", 20, processes=4),
        Row("constant_with_warmup, 20", _kohya("constant_with_warmup", 20), "constant_with_warmup", 20),
    ],
    "ai-toolkit": [
        Row("constant", _toolkit("constant"), "constant"),
        Row(
            "constant_with_warmup, 20",
            _toolkit("constant_with_warmup", {"num_warmup_steps": 20}),
            "constant_with_warmup",
            20,
        ),
        Row("linear", _toolkit("linear"), "linear"),
        Row("cosine", _toolkit("cosine")),
        Row("cosine, gradient_accumulation 4", _toolkit("cosine", gradient_accumulation=4)),
        Row("cosine, gradient_accumulation_steps 4", _toolkit("cosine", gradient_accumulation_steps=4), counted=50),
        Row("cosine, 2 processes", _toolkit("cosine"), processes=2),
        Row(
            "cosine_with_restarts, T_0 50",
            _toolkit("cosine_with_restarts", {"T_0": 50}),
            "cosine_annealing_warm_restarts:T_0=50",
        ),
        Row("step, step_size 50", _toolkit("step", {"step_size": 50}), "step:step_size=50"),
        Row("polynomial", _toolkit("polynomial"), "polynomial"),
    ],
    "onetrainer": [
        Row("LINEAR, warm-up 20", _one("LINEAR", 20), "linear", 20),
        Row("REX, warm-up 20", _one("REX", 20), "rex:d=0.9", 20),
        Row("COSINE, warm-up 20", _one("COSINE", 20), warmup=20),
        Row("COSINE, warm-up 20, accumulation 4", _one("COSINE", 20), warmup=20, accumulation=4),
        Row("COSINE, warm-up 1", _one("COSINE", 1), warmup=1),
        Row("COSINE, 20 updates longer than planned", _one("COSINE"), more={"train": 220}),
        Row("COSINE_WITH_RESTARTS, 1 cycle", _one("COSINE_WITH_RESTARTS"), "cosine_with_restarts"),
        Row("COSINE_WITH_HARD_RESTARTS, 3 cycles", _one("COSINE_WITH_HARD_RESTARTS", num_cycles=3), HARD),
        Row("COSINE, 200 updates, resumed for 400", _one("COSINE"), more=TWICE),
        Row("CUSTOM linear, warm-up 50", _one("CUSTOM", 50, **LINEAR), "linear", 50),
        Row("the same, resumed at 100", _one("CUSTOM", 50, **LINEAR), "linear", 50, more={"stop_at": 100, "then": {}}),
    ],
    "diffusion-pipe": [
        Row("constant, warm-up 20", _pipe("constant", 20), "constant_with_warmup:warmup_start_ratio=0.05", 20),
        Row("linear", _pipe("linear"), "linear"),
        Row("linear, warm-up 50", _pipe("linear", 50), "linear:warmup_start_ratio=0.02", 50),
        Row("cosine", _pipe("cosine"), "cosine:min_lr=1e-6"),
        Row("cosine, warm-up 50", _pipe("cosine", 50), "cosine:min_lr=1e-6,warmup_start_ratio=0.02", 50),
        Row("cosine, max_steps 100 of 200", _pipe("cosine"), "cosine:min_lr=1e-6", counted=100, more={"train": 100}),
        Row("cosine, lr 1e-6", _pipe("cosine"), lr=1e-6),
        Row("cosine, lr 5e-7", _pipe("cosine"), lr=5e-7),
    ],
    "diffsynth-studio": [
        Row("nothing", {}, "constant"),
        Row("nothing, accumulation 4", {}, "constant", accumulation=4),
        Row("nothing, 4 processes", {}, "constant", processes=4),
    ],
}


@dataclass(frozen=True)
class Result:
    """What the audit recorded of a row."""

    row: Row
    lr: np.ndarray  # relative to the peak that was asked for
    expected: np.ndarray
    findings: list
    error: str | None

    @property
    def is_as_asked(self):
        return self.error is None and np.abs(self.lr - self.expected).max() < CLOSE

    @property
    def shown_findings(self):
        """Without the note on a warm-up in steps of the scheduler, where it lasts as long as it was asked to."""
        names = [name for name in self.findings if not (self.is_as_asked and name == "warmup_scaled")]
        return ", ".join(f"`{name}`" for name in names) or "–"

    @property
    def ran(self):
        if not len(self.lr):
            return f"fails with {self.error}"
        lr, stop = self.lr, self.row.more.get("stop_at")
        highest = int(np.argmax(lr >= lr.max() * (1 - 1e-6)))
        parts = [f"{lr[0]:.3g} at first", f"{lr.max():.3g} at update {highest:,}"] if highest else [f"{lr[0]:.3g} at first"]
        if stop:
            parts.append(f"{lr[stop - 1]:.3g} before and {lr[stop]:.3g} after the resume")
        shape = f"{lr[0]:.3g} throughout" if np.ptp(lr) < 1e-9 else ", ".join([*parts, f"{lr[-1]:.3g} at the last"])
        if self.error:
            return f"{shape}, then {self.error}"
        return f"as asked: {shape}" if self.is_as_asked else shape


def audit_row(host, checkout, row):
    """Trains in a process of its own, under the audit."""
    return audited(host, row, [sys.executable, str(LOOPS), host, str(checkout), row.as_json()])


def audited(host, row, command):
    """Runs a program that trains as a row says, under the audit."""
    with tempfile.TemporaryDirectory() as folder:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            run_audited(command, AuditOptions(Path(folder), row.expectation))
        record = json.loads((Path(folder) / "lr_audit.json").read_text())
    print(f"--- {host}: {row.asked}\n{said.getvalue().rpartition('Wrote ')[0]}", file=sys.stderr)
    parts = record["optimizers"]
    lr, expected = (np.array([value for part in parts for value in part["groups"][0][key]]) for key in ("lr", "expected_lr"))
    findings = [finding["name"] for part in parts[-1:] for finding in part["findings"]]
    peak = max(expected, default=1.0)
    return Result(row, lr / peak, expected / peak, findings, record["error"])


def table(host, results):
    """A Markdown row for each result; rates relative to the asked peak."""
    lines = ["| asked | ran: share of the peak | the audit's findings |", "|---|---|---|"]
    for each in results:
        lines.append(f"| {each.row.asked} | {each.ran} | {each.shown_findings} |")
    return "\n".join(lines)


def _wrapped(title):
    """Lines as wide as a panel; a number stays with the word before it."""
    return "\n".join(textwrap.wrap(re.sub(r"(?<=\w) (?=\d)", "\u00a0", title), 27, **WHOLE_WORDS))


def draw(results, path):
    """Small multiples: what was asked in grey, what ran in colour."""
    from matplotlib.lines import Line2D

    shown = [each for each in results if len(each.lr)]
    rows = -(-len(shown) // 2)
    figure = new_figure(4.2, 0.6 + 1.3 * rows, dpi=200)
    panels = figure.subplots(rows, 2, squeeze=False).flat
    for axes, each in itertools.zip_longest(panels, shown):
        if each is None:
            axes.set_visible(False)
            continue
        plain_axes(axes)
        axes.plot(each.expected, color=GREY, linewidth=3.5, alpha=0.7)
        axes.plot(each.lr, color=BLUE if each.is_as_asked else ORANGE, linewidth=1.4)
        axes.set_title(_wrapped(each.row.asked), fontsize=7, loc="left", color=DARK)
        axes.tick_params(labelsize=7)
        axes.set_ylim(-0.05, 1.08 * max(1.0, each.lr.max()))
        axes.locator_params(axis="x", nbins=4)
    styles = {"asked": (GREY, 3.5), "ran as asked": (BLUE, 1.4), "ran otherwise": (ORANGE, 1.4)}
    lines = [Line2D([], [], color=color, linewidth=width, label=name) for name, (color, width) in styles.items()]
    figure.legend(handles=lines, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.supxlabel("update", fontsize=8)
    figure.supylabel("learning rate, relative to the peak", fontsize=8)
    save_figure(figure, path)


def made_up(folder):
    """A checkout in the shape of diffusion-pipe's, whose cosine is too long by its warm-up."""
    text = """\
scheduler_type = config["lr_scheduler"]
length = config["epochs"] * steps_per_epoch + config["warmup_steps"]
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
model_engine.lr_scheduler = lr_scheduler
"""
    (Path(folder) / "train.py").write_text(
        f"if __name__ == '__main__':\n    {text.strip().replace(chr(10), chr(10) + '    ')}\n"
    )
    return [Row(f"cosine, {n} too long", {"lr_scheduler": "cosine", "warmup_steps": n}, updates=20) for n in (0, 10)]


def main():
    parser = common.make_parser(__doc__)
    parser.add_argument("host", nargs="?", choices=list(ROWS), metavar="HOST")
    parser.add_argument("checkout", nargs="?", type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="for HOST.png (default: .)")
    options = common.parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            host, checkout, rows = "diffusion-pipe", Path(folder), made_up(folder)
        elif options.checkout is None:
            parser.error("give a HOST and a CHECKOUT of it")
        else:
            host, checkout, rows = options.host, options.checkout, ROWS[options.host]
        results = [audit_row(host, checkout.resolve(), row) for row in rows]
    options.out.mkdir(parents=True, exist_ok=True)
    draw(results, options.out / f"{host}.png")
    print(f"{host} (written for commit {COMMITS[host]}); {common.machine()}\n\n{table(host, results)}")


if __name__ == "__main__":
    main()
