r"""Formulas on the site: those of docstrings are what the code computes, and each is drawn without scripts."""

import importlib
import math
import re

import numpy as np
import printed
import pytest
from tables import cases

from diffusers_lrlab import Progress
from diffusers_lrlab.averaging.forms import EMA_FORMS
from diffusers_lrlab.objective.process import OBJECTIVES, make_process
from diffusers_lrlab.schedules.registries import COOLDOWNS, MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS

N, W = 1000, 100
CLOCK = Progress(np.arange(W, N), total_updates=N, warmup_updates=W)
P = (CLOCK.update - W) / (N - W)
AFTER = CLOCK.update - W


FUNCTIONS = {"cos": np.cos, "exp": np.exp, "ln": np.log, "min": np.minimum, "max": np.maximum, "sqrt": np.sqrt}
FUNCTIONS |= {"floor": np.floor, "abs": np.abs, "pi": math.pi}
PYTHON = {r"\lfloor": "floor(", r"\rfloor": ")", r"\lvert": "abs(", r"\rvert": ")", r"\bmod": "%", "^": "**"}
PYTHON |= {"{": "(", "}": ")", "\\": " "}


def evaluate(latex, symbols):
    """The value of a formula in LaTeX with these symbols by name (`gamma`, `b_0`, `SNR`), numbers or arrays."""
    text = re.sub(r"\\text\{(\w+)\}", r"\1", latex)
    for sign, python in PYTHON.items():
        text = text.replace(sign, python)
    text = re.sub(r"\bln +(\w+)", r"ln(\1)", text)
    return eval(re.sub(r"(?<=[\w)])\s+(?=[\w(])", "*", text).strip(), {**FUNCTIONS, **symbols})


def formula(entry, left):
    """The right side of the formula `left = ...` in the docstring of an entry."""
    pattern = rf"\\\({re.escape(left)} (?:=|\\propto) (.+?)\\\)"
    found = re.search(pattern, " ".join(entry.function.__doc__.split()))
    assert found, (entry.name, left)
    return found[1]


def own(registry, name, given):
    """The arguments of an entry's function, without those of what is around it."""
    common = {*(parameter.name for parameter in registry.common), "f_max"}
    return {key: value for key, value in registry[name].resolve(given).items() if key not in common}


_DDPM = {key: value for key, value in OBJECTIVES["ddpm"].resolve({}).items() if key != "base_resolution"}
LEVELS = make_process("ddpm", is_bounded=True, **{**_DDPM, "num_steps": N}).levels
STEPS = np.arange(1, 500)
SHAPES = {  # the arguments of a schedule, and the symbols of its formula
    "linear": ({}, {"p": P}),
    "cosine": ({"num_cycles": 1.5}, {"p": P, "c": 1.5}),
    "cosine_with_restarts": ({"num_cycles": 3}, {"p": P, "c": 3}),
    "polynomial": ({"power": 2.5}, {"p": P, "k": 2.5}),
    "inverse_sqrt": ({"timescale": 50}, {"n": CLOCK.update, "w": W, "t": 50}),
    "cosine_warmup_with_min_lr": ({"num_cycles": 0.5}, {"p": np.minimum((AFTER + 1) / (N - W), 1), "c": 0.5}),
    "step": ({"step_size": 70, "gamma": 0.3}, {"n": AFTER, "k": 70, "gamma": 0.3}),
    "exponential": ({"gamma": 0.99}, {"n": AFTER, "gamma": 0.99}),
    "cosine_annealing": ({"T_max": 400}, {"n": AFTER, "T": 400}),
    "rex": ({"d": 0.7}, {"z": 1 - P, "d": 0.7}),
    "edm2_inverse_sqrt": ({"reference_images": 9000, "images_per_update": 32}, {"m": 32 * CLOCK.update, "m_ref": 9000}),
}
WEIGHTS = {  # the arguments, which are symbols, too
    **{"min_snr": {"gamma": 3.0}, "soft_min_snr": {"gamma": 3.0}, "max_snr": {"gamma": 3.0}, "truncated_snr": {}},
    **{"p2": {"gamma": 0.7, "k": 2.0}, "debiased": {}, "edm": {"sigma_data": 0.3}, "sigma_sqrt": {}, "cosmap": {}},
}
DECAYS = {
    "warmup_power": ({"inv_gamma": 2.0, "power": 0.6, "max_decay": 0.999999}, {"g": 2.0, "k": 0.6}),
    "constant": ({"decay": 0.99}, {"d": 0.99}),
    "half_life": ({"images": 5000, "rampup": 0.1, "images_per_update": 32}, {"h": 5000, "r": 0.1, "B": 32}),
    "power_function": ({"gamma": 6.94}, {"gamma": 6.94}),
}
MOMENTA = {"demon": ("b", 0), "mdlrc_lr_only": ("lr", 1), "mdlrc_linear": ("b", 0)}


def computed():
    """Names, what their functions compute, and the same by the formulas of their docstrings."""
    for name, (given, symbols) in SHAPES.items():
        entry = SCHEDULERS[name]
        yield name, entry(CLOCK, **own(SCHEDULERS, name, given)), evaluate(formula(entry, "s"), symbols)
    for name, given in WEIGHTS.items():
        entry, symbols = LOSS_WEIGHTINGS[name], {"SNR": LEVELS.snr, "sigma": LEVELS.flow_sigma, **given}
        yield name, entry(LEVELS, **own(LOSS_WEIGHTINGS, name, given)), evaluate(formula(entry, "w"), symbols)
    for name, (given, symbols) in DECAYS.items():
        entry = EMA_FORMS[name]
        yield name, entry(STEPS, 1, **own(EMA_FORMS, name, given)), evaluate(formula(entry, "d_n"), {"n": STEPS, **symbols})
    for name, (left, index) in MOMENTA.items():
        entry = MOMENTUM_SCHEDULERS[name]
        values = entry(CLOCK, 0.9, **entry.resolve({}))[index]
        yield name, values, evaluate(formula(entry, left).replace("lr_0", ""), {"p": P, "b_0": 0.9})
    text = " ".join(SCHEDULERS["warmup_stable_decay"].function.__doc__.split())
    shapes, q = dict(re.findall(r"`([\w-]+)` \\\((.+?)\\\)", text)), np.linspace(0, 1, 11)
    assert shapes.keys() == COOLDOWNS.keys()
    for name, latex in shapes.items():
        yield name, COOLDOWNS[name](q), evaluate(latex, {"q": q})


@cases("name, values, of_formula", computed())
def test_a_formula_is_what_is_computed(name, values, of_formula):
    np.testing.assert_allclose(values, of_formula, rtol=1e-12, atol=1e-12)


DENSITIES = {  # what the density is over, and the symbols of its formula besides the arguments
    "cosine_map": (r"p(\tau)", {}, {}),
    "truncated_normal": (r"p(\tau)", {"mean": 0.4, "std": 0.2}, {"mu": 0.4, "s": 0.2}),
    "beta": (r"p(\tau)", {"alpha": 1.6, "beta": 1.3}, {"alpha": 1.6, "beta": 1.3}),
    "logit_normal": (r"p(\tau)", {"mean": 0.5, "std": 0.8}, {"mu": 0.5, "s": 0.8}),
    "edm_log_normal": (r"p(\ln \sigma)", {"p_mean": -1.0, "p_std": 1.1}, {"mu": -1.0, "s": 1.1}),
    "laplace": (r"p(\ln \text{SNR})", {"mean": 0.3, "scale": 0.9}, {"mu": 0.3, "b": 0.9}),
}


@cases("name", DENSITIES)
def test_the_formula_of_a_density_is_what_is_drawn(name):
    """The probability of a timestep is the density in its middle times its width, as nearly as 1000 of them can show."""
    entry, of, (over, given, symbols) = TIMESTEP_SAMPLERS[name], LEVELS, DENSITIES[name]
    drawn = entry(CLOCK, of, **own(TIMESTEP_SAMPLERS, name, given))
    borders = of.borders if "tau" in over else of.log_sigma_borders
    middle = (borders[1:] + borders[:-1]) / 2
    values = {"tau": middle, "sigma": np.exp(middle), "SNR": np.exp(-2 * middle), **symbols}
    if name == "logit_normal":
        values["x"] = evaluate(formula(entry, "x"), values)
    density = evaluate(formula(entry, over), values) * np.diff(borders)
    inside = slice(20, -20)  # the ends of the noise levels are wide
    shares = [each[inside] / each[inside].sum() for each in (drawn, density)]
    np.testing.assert_allclose(*shares, rtol=0.01)


@pytest.fixture(scope="module")
def formulas():
    pytest.importorskip("latex2mathml")
    pytest.importorskip("markdown")
    with printed.docs_modules():
        return importlib.import_module("formulas")


def rendered(formulas, text):
    from markdown import Markdown

    return Markdown(extensions=["tables", formulas.Formulas()]).convert(text)


def test_every_formula_of_pages_and_docstrings_is_drawn(formulas):
    texts = [page.read_text(encoding="utf-8") for page in printed.PAGES]
    texts += [formulas.of_entry(entry) for registry in formulas.OF_TABLES.values() for entry in registry.values()]
    count = 0
    for text in texts:
        outside = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
        html = rendered(formulas, outside)
        count += html.count("<math")
        assert not re.search(r"\$|\\\(|\\[a-z]", html), re.search(r".{40}(\$|\\\(|\\[a-z]).{40}", html, re.DOTALL)
    assert count > 100


def test_a_formula_is_told_from_money_and_code(formulas):
    html = rendered(formulas, r"From $x_1$ to $y*z*2$ costs $5 and $6; `$HOME` and `$x$` stay, $$\frac{a}{b}$$ is a block.")
    assert html.count("<math") == 3
    assert html.count('display="block"') == 1
    assert "costs $5 and $6" in html
    assert "<code>$HOME</code> and <code>$x$</code>" in html
    assert "<em>" not in html
