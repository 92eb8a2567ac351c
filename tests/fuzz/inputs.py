"""Generated options and files: strategies of hypothesis, mostly close to what is allowed."""

import json
import math
import re
import typing

import yaml
from hypothesis import strategies as st

from diffusers_lrlab.core.options import options_of
from diffusers_lrlab.core.values import Range
from diffusers_lrlab.finder.range_test import FinderConfig
from diffusers_lrlab.training.config import TrainingConfig

# Options whose values would be looked for on the network, or run.
_ELSEWHERE = ("plugins", "hub_token", "cache_dir")
_HINTS = typing.get_type_hints(TrainingConfig) | typing.get_type_hints(FinderConfig)
OPTIONS = {
    name: known for name, known in (options_of(TrainingConfig) | options_of(FinderConfig)).items() if name not in _ELSEWHERE
}
_OPTION_NAMES = st.sampled_from(sorted(OPTIONS))
_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=12)
_ODD_NUMBERS = st.sampled_from(
    ["-1", "0", "1e5", "1.5", "-0", "nan", "-inf", "inf", "1e999", "1e-320", "0x10", "1_000", " 5", "", "True", "٣", "½"]
    + [str(10**10), "1" + "0" * 400, "9" * 5000, str(2**63), str(-(2**63)), "1e308", "0.1e1"]
)
_NAMES = st.sampled_from(["dino", "digits", "circle", "moons", "dinos", "no-such-folder", ".", ""])


def _values():
    """Values of parameters; of "@30", [`_mutated`] makes lists within lists."""
    usual = st.one_of(
        st.integers(-2, 1000), st.floats(0, 1), st.booleans(), st.sampled_from(["linear", "cosine", "rex:d=0.9"])
    )
    odd = st.one_of(st.integers(), st.floats(), st.none(), _WORDS, st.sampled_from([10**400, 1e300, 5e-324, 2**53]))
    deep = st.sampled_from(["@30", "@400", "@2000"])
    return st.one_of(usual, usual, usual, st.lists(usual, max_size=4), odd, deep)


@st.composite
def _mutated(draw, text):
    """The text, seldom with a part of it taken away, doubled, or replaced."""
    text = re.sub("""["']?@([0-9]+)["']?""", lambda depth: "[" * int(depth[1]) + "]" * int(depth[1]), text)
    if draw(st.integers(0, 3)) or not text:
        return text
    start = draw(st.integers(0, len(text) - 1))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.one_of(st.just(""), st.just(2 * text[start:end]), _WORDS)) + text[end:]


@st.composite
def _specs(draw, registry):
    """A spec string of a registry's names, with parameters of theirs, of others, and broken ones."""
    known_names = st.sampled_from(sorted(registry))
    name = draw(st.one_of(known_names, known_names, _WORDS))
    known = [*registry[name].parameters, *registry[name].common] if name in registry else []
    kwargs = {
        each.name: draw(_fitting(each)) for each in (draw(st.lists(st.sampled_from(known), max_size=2)) if known else ())
    }
    if draw(st.integers(0, 2)) == 0:
        kwargs |= draw(st.dictionaries(st.sampled_from([*kwargs, "gamma", "d", "schedules", "x"]), _values(), max_size=2))
    if draw(st.booleans()):
        return draw(_mutated(f"{name}:{json.dumps(kwargs)}"))
    pairs = (f"{key}={value if isinstance(value, str) else _listed(value)}" for key, value in kwargs.items())
    return draw(_mutated(":".join(filter(None, [name, ",".join(pairs)]))))


def _fitting(parameter):
    """A value that a parameter allows, as far as it says so."""
    if parameter.choices is not None:
        return st.sampled_from(parameter.choices)
    low, high = (parameter.interval or Range("(0, 100)")).bounds
    low, high = max(low, -100.0), min(high, 1000.0)
    whole = st.integers(math.ceil(low), math.floor(high)) if math.ceil(low) <= math.floor(high) else st.just(low)
    kinds = {int: whole, float: st.floats(low, high), bool: st.booleans(), str: st.sampled_from(["linear", "cosine"])}
    items = kinds[parameter.items if parameter.kind is list else parameter.kind]
    return st.lists(items, min_size=1, max_size=3) if parameter.kind is list else items


def _listed(value):
    return f"[{'|'.join(map(_listed, value))}]" if isinstance(value, list) else json.dumps(value)


def _value_of(name):
    """A value of an option, as it is typed."""
    known, hint = OPTIONS[name], _HINTS[name]
    kinds = {hint, *typing.get_args(hint)}
    if name == "dataset_name":
        return _NAMES
    if known.registry:
        return _specs(known.entries)
    if name.endswith("_kwargs"):
        keys = st.sampled_from(["gamma", "d", "sigma", "momentum", "x"])
        return st.dictionaries(keys, _values(), max_size=2).map(json.dumps).flatmap(_mutated)
    if int in kinds or float in kinds:
        low, high = map(float, (known.range or Range("[0, 1e6]")).bounds)
        usual = min(high, 2000.0)
        if int in kinds:
            fits = st.one_of(st.integers(int(low), int(usual)), st.integers(int(low), int(high))).map(str)
        else:
            fits = st.floats(low, usual).map(repr)
        return st.one_of(fits, fits, fits, _ODD_NUMBERS)
    if bool in kinds:
        return st.sampled_from(["true", "false", "True", "1", "no", "maybe", ""])
    choices = [choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)]
    return st.one_of(st.sampled_from([*map(str, choices), "none", "latest"]), _WORDS)


@st.composite
def argument_lists(draw):
    """A command line for training or for the finder."""
    arguments = [f"--dataset_name={draw(_NAMES)}"] if draw(st.booleans()) else []
    for name in draw(st.lists(_OPTION_NAMES, min_size=1, max_size=4)):
        form, value = draw(st.integers(0, 9)), draw(_value_of(name)).replace("\0", "")
        if _HINTS[name] is bool and form < 5:
            arguments.append(draw(st.sampled_from([f"--{name}", f"--no_{name}"])))
        elif form == 9:
            arguments.append(draw(_mutated(f"--{name}={value}")))
        else:
            arguments += [f"--{name}={value}"] if form < 7 else [f"--{name}", value]
    return arguments


@st.composite
def configurations(draw):
    """The text of a YAML file of options."""
    fields = {}
    for name in draw(st.lists(_OPTION_NAMES, max_size=4)):
        text = draw(_value_of(name))
        try:
            typed = json.loads(text)
        except (ValueError, RecursionError):
            typed = text
        fields[name] = draw(st.one_of(st.just(text), st.just(typed), _values()))
    return draw(_mutated(yaml.safe_dump(fields)))


@st.composite
def studies(draw):
    """The text of a YAML file of a study."""
    fields = ["lr_scheduler", "learning_rate", "controls", "optimizer", "seed", "description", "learning_rates"]
    arm = st.dictionaries(st.sampled_from(fields), _values(), max_size=2)
    arms = {"cosine": {"lr_scheduler": "cosine"}}
    arms |= draw(st.dictionaries(st.sampled_from(["a", "b", "--", 1]), arm, max_size=2))
    spec = {"base": {"max_train_steps": 10}, "arms": arms, "datasets": ["dino"]}
    keys = ["title", "base", "arms", "datasets", "seeds", "learning_rates", "baseline", "metrics", "primary_metric"]
    keys += ["tune", "evaluation_points", "x"]
    spec |= draw(st.dictionaries(st.sampled_from(keys), _values(), max_size=3))
    return draw(_mutated(yaml.safe_dump(spec, sort_keys=False)))
