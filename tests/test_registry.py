import pytest

from diffusers_lrlab.errors import LabError
from diffusers_lrlab.registry import Parameter, Registry
from diffusers_lrlab.schedules.catalogue import SCHEDULERS


@pytest.fixture
def registry():
    registry = Registry("colour")
    registry.register(
        "red",
        description="like blood",
        source="nature",
        parameters=(
            Parameter("shade", float, 0.5, "how dark", "(0, 1]"),
            Parameter("coats", int, None, "layers of paint; derived: as many as needed", "[1, inf)"),
            Parameter("kind", str, "oil", "of paint", choices=("oil", "water")),
        ),
        traits=("warm",),
    )(object())
    return registry


def test_unknown_name_suggests_and_lists(registry):
    with pytest.raises(LabError, match=r"Unknown colour 'rad'. Did you mean 'red'\? Known: red\."):
        registry["rad"]


def test_a_name_is_taken_only_once(registry):
    with pytest.raises(LabError, match="already registered"):
        registry.register("red", description="", source="")(object())


def test_resolve_fills_in_defaults_and_converts(registry):
    assert registry["red"].resolve({"shade": 1, "coats": 2.0}) == {"shade": 1.0, "coats": 2, "kind": "oil"}
    assert isinstance(registry["red"].resolve({"coats": 2.0})["coats"], int)
    assert registry["red"].resolve({})["coats"] is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shade": 0}, r"shade=0; allowed: float in \(0, 1\]"),
        ({"shade": 1.0001}, r"shade=1.0001"),
        ({"shade": float("nan")}, "shade=nan"),
        ({"shade": "dark"}, "shade='dark'"),
        ({"shade": True}, "shade=True"),
        ({"coats": 1.5}, r"coats=1.5; allowed: int in \[1, inf\)"),
        ({"coats": 0}, "coats=0"),
        ({"kind": "wax"}, "allowed: one of 'oil', 'water'"),
        ({"kind": 3}, "kind=3"),
        ({"shda": 1}, r"does not take 'shda': it takes shade, coats, kind\. Did you mean 'shade'\?"),
    ],
)
def test_wrong_arguments_name_value_and_range(registry, kwargs, message):
    with pytest.raises(LabError, match=message):
        registry["red"].resolve(kwargs)


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_schedule_is_documented(name):
    entry = SCHEDULERS[name]
    assert entry.description
    assert entry.source
    assert all(parameter.help for parameter in entry.parameters)
    assert f"| `{name}` | {entry.description} |" in SCHEDULERS.table()
    # The defaults must satisfy the ranges they stand beside.
    entry.resolve({parameter.name: parameter.default for parameter in entry.parameters})
