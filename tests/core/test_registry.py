"""The registry, and what each registration gives: values, documentation, errors and a function in diffusers' form."""

import inspect
import math
import pickle
import pkgutil
import re
from pathlib import Path

import diffusers.optimization
import numpy as np
import pytest
import transformers.optimization
from schedule_rows import BASE, Row, close, cos, variants
from tables import cases

import diffusers_lrlab
from diffusers_lrlab import list_schedulers, lr_curve
from diffusers_lrlab.cli.show import LISTED
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.core.registry import Parameter, Registry
from diffusers_lrlab.schedules import scheduler as functions
from diffusers_lrlab.schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from diffusers_lrlab.schedules.schedule import resolve_schedule
from diffusers_lrlab.timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS


@pytest.fixture
def registry():
    gloss = Parameter("gloss", float, 0.0, "of the surface", "[0, 1]")
    registry = Registry("colour", common=(gloss,), traits={"warm": "of long waves"})
    registry.register(
        "red",
        description="like blood",
        source="nature",
        parameters=(
            Parameter("shade", float, 0.5, "how dark", "(0, 1]"),
            Parameter("coats", int, None, "layers of paint; derived: as many as needed", "[1, inf)"),
            Parameter("kind", str, "oil", "of paint", choices=("oil", "water")),
            Parameter("dry", bool, False, "whether to wait"),
            Parameter("mixture", list, (0.5, 0.5), "shares", "[0, 1]"),
            Parameter("layers", list, None, "names", items=str),
            Parameter("shine", float, None, "another name for `gloss`", "[0, 1]", same_as="gloss"),
        ),
        traits=("warm",),
        aliases=("rouge",),
    )(object())
    return registry


def test_unknown_name_suggests_and_lists(registry):
    with pytest.raises(LabError, match=r"Unknown colour 'rad'. Did you mean 'red'\? Known: red, rouge\."):
        registry["rad"]
    with pytest.raises(LabError, match=r"Unknown colour 'teal'\. Known: red, rouge\. For a name of your own, .*--import"):
        registry["teal"]


def test_a_trait_is_one_of_the_registrys(registry):
    expected = "trait='wamr' of the colour 'pink': must be one of 'warm', got 'wamr'. Hint: Did you mean 'warm'?"
    with pytest.raises(LabError, match=re.escape(expected)):
        registry.register("pink", description="", source="", traits=("wamr",))
    with pytest.raises(LabError, match="trait='warm' of the shape 'round': must be left out: there are none"):
        Registry("shape").register("round", description="", source="", traits=("warm",))


@pytest.mark.parametrize("taken", [{"name": "red"}, {"name": "rouge"}, {"name": "pink", "aliases": ("red",)}])
def test_a_name_is_taken_only_once(registry, taken):
    with pytest.raises(LabError, match="already registered"):
        registry.register(**taken, description="", source="")(object())


def test_an_alias_is_the_entry_but_is_not_listed(registry):
    assert registry["rouge"] is registry["red"]
    assert "rouge" in registry
    assert list(registry) == ["red"]
    assert registry.aliases == {"rouge": "red"}
    assert registry.aliases_of(registry["red"]) == ["rouge"]


def test_resolve_fills_in_defaults_and_converts(registry):
    given = registry["red"].resolve({"shade": 1, "coats": 2.0, "mixture": (1, 0), "shine": 1})
    expected = {"shade": 1.0, "coats": 2, "kind": "oil", "dry": False, "mixture": [1.0, 0.0], "layers": None, "gloss": 1.0}
    assert given == expected
    assert [type(value) for value in (given["shade"], given["coats"], *given["mixture"])] == [float, int, float, float]
    assert registry["red"].resolve({})["coats"] is None


def test_an_unknown_argument_suggests_and_lists(registry):
    message = "does not take 'shda': it takes shade, coats, kind, dry, mixture, layers, shine, gloss. Did you mean"
    with pytest.raises(LabError, match=message):
        registry["red"].resolve({"shda": 1})


# --- every entry -----------------------------------------------------------------------------------------------------

REGISTRIES = [pkgutil.resolve_name(f"diffusers_lrlab.{module}:{name}") for module, name, _ in LISTED.values()]
ENTRIES = [entry for registry in REGISTRIES for entry in registry.values()]
each_name = cases("name", list_schedulers())


@cases("entry", ENTRIES)
def test_it_is_documented(entry):
    assert entry.description
    assert entry.source
    assert all(parameter.help for parameter in (*entry.parameters, *entry.common))
    # The defaults must satisfy the ranges they stand beside.
    entry.resolve({parameter.name: parameter.default for parameter in entry.parameters})


def wrong_values(parameter):
    """Values of other kinds, and just outside of the range."""
    if parameter.kind is list:
        return ["0.5", 0.5, [None], [True], [[0.5]], [math.nan] if parameter.items is float else [1]]
    if parameter.kind is bool:
        return [0, 1, "true", [True]]
    if parameter.kind is str:
        return [1, True, ["linear"], *(["no such choice"] if parameter.choices else [])]
    values = ["1", True, [1], math.nan, *([1.5] if parameter.kind is int else [])]
    if parameter.range:
        ends = zip(parameter.interval.bounds, "[]", (-math.inf, math.inf), strict=True)
        outside = (math.nextafter(end, beyond) if bracket in parameter.range else end for end, bracket, beyond in ends)
        values += [value for value in outside if (value, parameter.range[-1]) != (math.inf, "]")]
    return values


@cases("entry", ENTRIES)
def test_every_parameter_refuses_what_is_not_allowed(entry):
    for parameter in (*entry.parameters, *entry.common):
        for value in wrong_values(parameter):
            message = f"{parameter.name}={value!r} of {entry.name!r}: must be "
            with pytest.raises(LabError, match=re.escape(message)) as refused:
                entry.resolve({parameter.name: value})
            assert f"{parameter.allowed}, got {value!r}. Hint: {parameter.help}." in str(refused.value)


@cases("entry", ENTRIES)
def test_two_names_of_one_thing_and_two_floors_are_refused(entry):
    names = {parameter.name for parameter in (*entry.parameters, *entry.common)}
    for parameter in (parameter for parameter in entry.parameters if parameter.same_as):
        with pytest.raises(
            LabError, match=f"{parameter.name}=0.* and {parameter.same_as}=1, two names of the same parameter"
        ):
            entry.resolve({parameter.name: 0, parameter.same_as: 1})
    if {"min_lr", "min_lr_ratio"} <= names and entry.registry is SCHEDULERS:
        with pytest.raises(LabError, match=r"min_lr=1e-05 and min_lr_ratio=0.1, which both set its floor"):
            resolve_schedule(entry.name, {"min_lr": 1e-5, "min_lr_ratio": 0.1})
        with pytest.raises(LabError, match=rf"The floor 0.002 of '{entry.name}' is above its peak, 0.001"):
            lr_curve(entry.name, BASE, 0, 10, {"min_lr": 2 * BASE})
        close(lr_curve(entry.name, BASE, 0, 10, {"min_lr": BASE}), BASE * np.ones(10))


# --- exact values ----------------------------------------------------------------------------------------------------

E = 1 / 25 / 1e4  # where one_cycle ends

EXACT = [
    ("constant", 3, 0, {}, [1, 1, 1]),
    ("constant_with_warmup", 2, 0, {}, [1, 1]),
    ("constant_with_warmup", 4, 2, {}, [0, 1 / 2, 1, 1]),
    ("linear", 4, 0, {"f_min": 0.5}, [1, 0.875, 0.75, 0.625]),
    ("linear", 4, 1, {"f_max": 2.0}, [0, 2, 4 / 3, 2 / 3]),
    ("cosine", 5, 1, {}, [0, *cos([0, 1 / 4, 1 / 2, 3 / 4])]),
    ("cosine", 3, 2, {}, [0, 1 / 2, 1]),
    ("cosine_with_restarts", 4, 0, {"num_cycles": 2}, [1, 1 / 2, 1, 1 / 2]),
    ("polynomial", 4, 0, {"power": 2.0, "lr_end": 0.0}, [1, 9 / 16, 1 / 4, 1 / 16]),
    ("piecewise_constant", 5, 0, {"step_rules": "1:2,0.1:4,0.01"}, [1, 1, 0.1, 0.1, 0.01]),
    ("inverse_sqrt", 5, 1, {"timescale": 3}, [0, 1, *np.sqrt([3 / 4, 3 / 5, 3 / 6])]),
    ("cosine_with_min_lr", 4, 1, {}, [0, 1, *(0.1 + 0.9 * cos([1 / 3, 2 / 3]))]),
    ("cosine_warmup_with_min_lr", 5, 2, {}, [1 / 2, 1, *(0.1 + 0.9 * cos([1 / 3, 2 / 3])), 0.1]),
    ("cosine_warmup_with_min_lr", 4, 1, {"warmup_lr_rate": 0.2}, [0.2, *(0.1 + 0.9 * cos([1 / 3, 2 / 3])), 0.1]),
    ("warmup_stable_decay", 10, 2, {}, [0, 1 / 2, 1, 1, 1, 1, 1, 1, 1, cos(1 / 2)]),
    ("wsd", 4, 0, {"num_decay_steps": 4, "decay_type": "1-sqrt"}, 1 - np.sqrt([0, 1 / 4, 2 / 4, 3 / 4])),
    ("wsd", 6, 1, {"num_stable_steps": 3, "decay_type": "linear"}, [0, 1, 1, 1, 1, 1 / 2]),
    ("trapezoid", 6, 1, {"num_decay_steps": 3, "min_lr_ratio": 0.4}, [0, 1, 1, 1, 0.8, 0.6]),
    ("step", 6, 0, {}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
    ("step", 5, 2, {"step_size": 1, "gamma": 0.5}, [0, 1 / 2, 1, 1 / 2, 1 / 4]),
    ("multistep", 4, 0, {}, [1, 1, 0.1, 0.01]),
    ("multistep", 4, 2, {"milestones": [3], "gamma": 0.5}, [0, 1 / 2, 1, 1 / 2]),
    ("exponential", 4, 1, {"gamma": 0.5}, [0, 1, 1 / 2, 1 / 4]),
    ("exponential", 4, 0, {}, 0.01 ** (np.arange(4) / 4)),
    ("cosine_annealing", 3, 1, {"eta_min": BASE / 2}, [0, 1, 3 / 4]),
    ("cosine_annealing", 4, 0, {"T_max": 2}, [1, 1 / 2, 0, 1 / 2]),
    ("cosine_annealing_warm_restarts", 7, 0, {"T_0": 1, "T_mult": 2}, [1, 1, 1 / 2, 1, *cos([1 / 4, 1 / 2, 3 / 4])]),
    ("cyclic", 7, 1, {"step_size_up": 2}, [0, 0.1, 0.55, 1, 0.55, 0.1, 0.55]),
    ("cyclic", 5, 0, {"step_size_up": 1, "mode": "triangular2", "min_lr": 0.0}, [0, 1, 0, 1 / 2, 0]),
    ("one_cycle", 10, 0, {"anneal_strategy": "linear"}, [0.04, 0.52, *(1 - np.arange(8) / 7 * (1 - E))]),
    ("one_cycle", 5, 2, {"anneal_strategy": "linear"}, [0.04, 0.52, 1, (1 + E) / 2, E]),
    ("rex", 5, 1, {}, [0, 1, 0.75 / 0.875, 0.5 / 0.75, 0.25 / 0.625]),
    ("edm2_inverse_sqrt", 10, 0, {}, [1, *(1 / np.sqrt(np.arange(1, 10)))]),
    ("piecewise", 4, 0, {}, [1, 1, 1, 0.55]),
    ("join", 4, 0, {}, [1, 1, 1, 1 / 2]),
    ("demon", 4, 1, {}, [0, 1, 1, 1]),
    ("mdlrc", 5, 1, {}, [0, 1, 0.775, 0.55, 0.325]),
    ("mdlrc", 4, 0, {"momentum_form": "heavy_ball"}, 1 / (1 - 0.9 * np.arange(4) / 4)),
    ("mdlrc_lr_only", 5, 1, {}, [0, 1, 0.775, 0.55, 0.325]),
    ("mdlrc_linear", 5, 1, {}, [0, 1, 0.75, 0.5, 0.25]),
    ("reduce_lr_on_plateau", 4, 2, {}, [0, 1 / 2, 1, 1]),
    ("greedy", 4, 2, {}, [0, 1 / 2, 1, 1]),
    ("adaptive", 4, 2, {}, [0, 1 / 2, 1, 1]),
]


@cases(("name", "num_updates", "warmup", "kwargs", "expected"), EXACT)
def test_exact_arrays(name, num_updates, warmup, kwargs, expected):
    close(lr_curve(name, BASE, warmup, num_updates, kwargs), BASE * np.asarray(expected))


# Where they begin; the default parts of join do not fit into one update.
STARTS = {"cyclic": 0.1, "one_cycle": E, "cosine_warmup_with_min_lr": 0.1, "join": None}


@each_name
def test_a_run_of_one_update(name):
    if (start := STARTS.get(name, 1.0)) is not None:
        close(lr_curve(name, BASE, 0, 1), [start * BASE])


# --- the function of every name --------------------------------------------------------------------------------------


@each_name
def test_each_name_has_a_function_in_diffusers_form(name):
    function, entry = getattr(diffusers_lrlab, f"get_{name}_schedule"), SCHEDULERS[name]
    own = [parameter.name for parameter in (*entry.parameters, *entry.common)]
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["optimizer", "num_warmup_steps", "num_training_steps", *own, "last_epoch"]
    assert parameters["last_epoch"].default == -1
    assert all(f"    {parameter} (" in function.__doc__ for parameter in own)
    assert entry.description in function.__doc__
    assert function is getattr(functions, f"get_{name}_schedule")
    assert function.__name__ == f"get_{name}_schedule"
    assert function.__name__ in dir(functions)
    assert pickle.loads(pickle.dumps(function)) is function


@each_name
def test_the_function_makes_what_get_scheduler_makes(name):
    for kwargs in variants(SCHEDULERS[name]):
        row = Row(SCHEDULERS[name].name, kwargs)
        expected = row.build(20, 3)[0]
        made = getattr(functions, f"get_{name}_schedule")(row.optimizer(), row.warmup(3), 20, **kwargs)
        assert type(made) is type(expected)
        assert made.state_dict() == expected.state_dict()


def test_functions_refuse_what_they_do_not_take():
    with pytest.raises(AttributeError, match="get_cosin_schedule"):
        diffusers_lrlab.get_cosin_schedule  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'"):
        functions.get_cosine_schedule(Row("cosine", {}).optimizer(), 0, 10, gamma=1)
    with pytest.raises(TypeError, match="missing a required argument: 'optimizer'"):
        functions.get_cosine_schedule()


@pytest.mark.parametrize("library", [diffusers.optimization, transformers.optimization], ids=lambda module: module.__name__)
def test_functions_take_what_the_libraries_own_take(library):
    theirs = {member.value: library.TYPE_TO_SCHEDULER_FUNCTION[member] for member in library.SchedulerType}
    theirs = {name: function for name, function in theirs.items() if name in SCHEDULERS and inspect.isfunction(function)}
    assert len(theirs) >= 7
    for name, function in theirs.items():
        kinds = inspect.signature(function).parameters.values()
        taken = {kind.name for kind in kinds if kind.kind is kind.POSITIONAL_OR_KEYWORD}
        assert taken <= set(inspect.signature(getattr(functions, f"get_{name}_schedule")).parameters)


# --- what is public --------------------------------------------------------------------------------------------------


def test_lists_have_the_names_of_their_registries():
    assert diffusers_lrlab.list_schedulers() == [*SCHEDULERS, *SCHEDULERS.aliases]
    assert diffusers_lrlab.list_momentum_schedulers() == [*MOMENTUM_SCHEDULERS]
    assert diffusers_lrlab.list_timestep_samplers() == [*TIMESTEP_SAMPLERS]
    assert diffusers_lrlab.list_loss_weightings() == [*LOSS_WEIGHTINGS]


def test_each_public_name_is_used_in_some_test():
    """So that a reader finds how it is used."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert [name for name in diffusers_lrlab.__all__ if not any(re.search(rf"\b{name}\b", text) for text in texts)] == []
