"""The demonstration: one page, without a server, whose data the registries make when it is built.

    python docs/demonstration/make_page.py DIR

writes `index.html` and the card of a Space into DIR, for `lrlab push DIR --repo_id USER/NAME --space`. The site has the same
page.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from diffusers_lrlab.core import web
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.files import write_text
from diffusers_lrlab.core.plotting import COLORS
from diffusers_lrlab.evaluation.metrics import metric_label
from diffusers_lrlab.hub.cards import space_card
from diffusers_lrlab.objective.process import OBJECTIVES, make_process
from diffusers_lrlab.preview.countings import COUNTINGS
from diffusers_lrlab.preview.plots import EXAMPLES
from diffusers_lrlab.preview.schedules import Run
from diffusers_lrlab.preview.timesteps import preview_timesteps
from diffusers_lrlab.schedules.expected import resolve_length, schedule_curves
from diffusers_lrlab.schedules.registries import SCHEDULERS
from diffusers_lrlab.schedules.resolve import resolve_schedule
from diffusers_lrlab.timesteps.noise_levels import NoiseLevels
from diffusers_lrlab.timesteps.registries import TIMESTEP_SAMPLERS

HERE = Path(__file__).parent
TITLE = "Asked, and what runs"
ABOUT = (
    "Learning-rate schedules as they are asked for, and as programs run them; densities of timesteps; the runs of a study."
)
CARD = HERE.parents[1] / "model_cards" / "lr-study-2d"
METRIC = "kl"
LENGTHS, WARMUPS, SHARES = (200, 1000), (0, 20, 100), (1, 2, 4)  # updates, updates; accumulation, and processes
POINTS = 81
ASKED = "asked, and by diffusers_lrlab"
NOISES = {
    "ddpm, linear": ("ddpm", {"beta_schedule": "linear"}),
    "ddpm, squaredcos_cap_v2": ("ddpm", {"beta_schedule": "squaredcos_cap_v2"}),
    "flow matching": ("flow_matching", {}),
}


def _digits(values: np.ndarray, spec: str = ".3g") -> list[float]:
    return [float(format(value, spec)) for value in values]


def _points(length: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, POINTS).round().astype(int))


def schedules() -> dict[str, Any]:
    """Curves as shares of the peak, each once, and which of them runs where: `runs[name][a run][a program]`."""
    curves: dict[str, int] = {}
    runs: dict[str, dict[str, dict[str, int]]] = {}
    for name, entry in SCHEDULERS.items():
        if "feedback" in entry.traits:  # follows the losses of a run
            continue
        runs[name] = {}
        for length, warmup, accumulation, processes in itertools.product(LENGTHS, WARMUPS, SHARES, SHARES):
            run = Run(length, warmup, 1.0, 0.9, processes, accumulation)
            found = {
                program: curves.setdefault(json.dumps(_digits(lrs[_points(length)])), len(curves))
                for program, lrs in _curves(name, run).items()
            }
            if found:
                runs[name][f"{length} {warmup} {accumulation} {processes}"] = found
    updates = {length: _points(length).tolist() for length in LENGTHS}
    return {"updates": updates, "curves": [json.loads(curve) for curve in curves], "runs": runs}


def _curves(name: str, run: Run) -> dict[str, np.ndarray]:
    """The learning rate at each update by program; nothing if the schedule takes no such warm-up."""
    schedule = resolve_schedule(name, EXAMPLES.get(name, {}))
    try:
        warmup, length = resolve_length(schedule, run.num_warmup_steps, run.num_updates)
        asked, _ = schedule_curves(schedule, 1.0, run.beta1, warmup, length)
    except LabError:
        return {}
    found = {ASKED: asked}
    for program, counting in COUNTINGS.items():
        if counting.is_tested(name, run.num_processes):
            clock = counting.clock(length, warmup, run.accumulation, run.num_processes)
            found[program] = np.ones(length) * schedule.at(clock, 1.0, run.beta1)[0]
    return found


def densities() -> dict[str, Any]:
    """Of each noise process: log SNR and its change at some timesteps, and densities at the start, middle and end."""
    found = {}
    for label, (objective, options) in NOISES.items():
        defaults = {key: value for key, value in OBJECTIVES[objective].resolve({}).items() if key != "base_resolution"}
        process = make_process(objective, is_bounded=True, **{**defaults, **options, "num_steps": 1000})
        alphas = process.levels.inner_alphas_cumprod
        log_snr = np.log(alphas / (1 - alphas))
        shown = np.linspace(2, 997, POINTS).astype(int)  # the SNR of a flow's first level is infinite
        found[label] = {
            "timesteps": shown.tolist(),
            "log_snr": _digits(log_snr[shown], ".4g"),
            # A density over log SNR is that over timesteps divided by how fast log SNR falls.
            "per_log_snr": _digits((1 / np.abs(np.gradient(log_snr)) / 1000)[shown]),
            "samplers": {name: curves for name in TIMESTEP_SAMPLERS if (curves := _density(name, process.levels, shown))},
        }
    return found


def _density(name: str, levels: NoiseLevels, shown: np.ndarray) -> list[list[float]]:
    """At start, middle and end; one curve if it stays; nothing if it follows the losses or is not for these noise levels."""
    if "feedback" in TIMESTEP_SAMPLERS[name].traits:
        return []
    try:
        (preview,) = preview_timesteps([name], [], 1000, 1000, "epsilon", levels)
    except LabError:
        return []
    return [_digits(curve[shown]) for curve in preview.curves.values()]


def study() -> dict[str, Any]:
    """The final values of a published study's runs."""
    runs = pd.read_parquet(CARD / "runs.parquet")
    runs = runs[(runs.stage == "compare") & (runs.status == "finished")].sort_values(["dataset", "seed"])
    columns = {"arm": runs.arm, "dataset": runs.dataset, "seed": runs.seed, "value": runs[METRIC].round(4)}
    return {"metric": METRIC, "runs": pd.DataFrame(columns).to_dict("records")}


def page() -> str:
    """The whole page."""
    texts = web.scripts(HERE / "page.js")
    data = {"asked": ASKED, "colors": COLORS, "schedules": schedules(), "densities": densities(), "study": study()}
    templates = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return templates.get_template("page.html").render(
        title=TITLE,
        data=Markup(web.as_json(data)),
        metric=metric_label(METRIC),
        scripts=[Markup(text) for text in texts],
        allowed=Markup(web.sources(texts)),
        style=Markup(web.STYLE.read_text(encoding="utf-8")),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    out = parser.parse_args().folder
    write_text(out / "index.html", page())
    write_text(out / "README.md", space_card(TITLE, ABOUT, licence="apache-2.0"))
    print(f"Wrote {out / 'index.html'}.")
