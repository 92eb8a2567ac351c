"""Reads the parts of a specification: arms, data sets, seeds, tuning."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import LabError, did_you_mean, must_be
from ...core.files import expanded
from ...core.options import names_where, options_of
from ...core.values import POSITIVE, SEED, Range
from ...evaluation.metrics import better_of
from ...training.config import TrainingConfig
from .spec import ARM_NOTES, Tuning

_MOST_SEEDS = 1000
_EXTENSIONS = Range("[0, 20]", whole=True)  # ten decades, by 1, 3, 10
_LONGEST = 64  # characters of a name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}")
_TUNING = ("learning_rates", "factors", "seeds", "metric", "extensions")


def check_keys(options: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raises a `LabError` for an unknown key."""
    for key in options:
        if key not in keys:
            raise LabError(f"There is no {key!r} in {where}.{did_you_mean(str(key), keys)} Known: {', '.join(keys)}.")


def list_of(value: Any, what: str) -> list[Any]:
    """The value as a list; raises a `LabError` for duplicates."""
    values = value if isinstance(value, list) else [value]
    for index, one in enumerate(values):
        if one in values[:index]:
            raise LabError(f"{what}: {one!r} is listed twice. Name each once.")
    return values


def _mapping(value: Any, what: str, hint: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise must_be(what, value, "a mapping of names to values", hint)
    return value


def read_seeds(value: Any, what: str) -> tuple[int, ...]:
    """Seeds from a list, or as many as a number says."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    seeds = list(range(min(value, _MOST_SEEDS + 1))) if is_number else list_of(value, what)
    if not seeds or len(seeds) > _MOST_SEEDS or not all(seed in SEED for seed in seeds):
        wanted = f"a number of seeds from 1 to {_MOST_SEEDS:,}, or a list of them"
        raise must_be(what, value, wanted, f"each is {SEED}, as in [0, 1, 2]")
    return tuple(seeds)


def _numbers(value: Any, what: str) -> tuple[float, ...]:
    """Numbers from a list, or a single one; a whole number reads like the number of them."""
    try:
        rates = () if isinstance(value, int) else tuple(float(rate) for rate in list_of(value, what))
    except (TypeError, ValueError, OverflowError):
        rates = ()
    if not rates or not all(rate in POSITIVE for rate in rates):
        raise must_be(what, value, "numbers above 0", "give the numbers themselves, as in [1e-4, 3e-4]")
    list_of(list(rates), what)  # again as numbers: YAML reads 3e-4 as text, but 0.0003 as a number
    return rates


def read_fields(fields: Any, where: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Training options as they are written; raises a `LabError` for unknown ones."""
    known = [*options_of(TrainingConfig), *also]
    for name in _mapping(fields, where, "such as 'lr_scheduler: cosine'"):
        if name in names_where(TrainingConfig, study="no"):
            raise LabError(f"{where} has {name}, which a study sets itself. Leave it out.")
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise LabError(f"There is no {name!r} in {where}.{hint} Use options of lrlab train; its --help explains them.")
    if fields.get("learning_rate") == "auto":
        raise LabError(f"{where} has learning_rate: auto, which would differ between seeds. Give a number, or use tune.")
    return dict(fields)


def _named(value: dict[Any, Any], what: str) -> dict[str, Any]:
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or "--" in name:
            wanted = "text of letters, digits and . _ @ + -, 64 at most, without '--'"
            raise must_be("the name", name, wanted, "files are named after it; put a number in quotes", of=what)
    return value


def read_arms(value: Any, rates: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Arms by name, one for each learning rate, and the suffix of each name for its rate."""
    arms: dict[str, dict[str, Any]] = {}
    endings: dict[str, str] = {}
    for name, fields in _named(_mapping(value, "arms", "such as 'cosine: {lr_scheduler: cosine}'"), "an arm").items():
        fields = read_fields({} if fields is None else fields, f"the arm {name!r}", (*ARM_NOTES, "learning_rates"))
        for source in names_where(TrainingConfig, study="data set"):
            if source in fields:
                raise LabError(
                    f"The arm {name!r} has {source}, but arms are compared on the same data. Add a data set instead."
                )
        own, expanded = fields.pop("learning_rates", rates), [("", fields)]
        if own is not None:
            if "learning_rate" in fields:
                raise LabError(f"The arm {name!r} has learning_rate and learning_rates. Give one of them.")
            several = _numbers(own, "learning_rates" if own is rates else f"learning_rates of {name!r}")
            expanded = [(f"@{rate:g}", {**fields, "learning_rate": rate}) for rate in several]
        for ending, its_fields in expanded:
            arm = name + ending
            if arm in arms:
                raise LabError(
                    f"Two arms would be called {arm!r}. Give other names, and rates that differ in their first 6 digits."
                )
            arms[arm], endings[arm] = its_fields, ending
    return arms, endings


def resolve_controls(arms: dict[str, dict[str, Any]], endings: Mapping[str, str], baseline: str) -> None:
    """
    Replaces the controls of arms by lists of full names: with several learning rates, those at the arm's own rate. Every arm
    is compared with the baseline, which is no control.
    """
    for arm, fields in arms.items():
        if "controls" not in fields:
            continue
        given, controls = fields.pop("controls"), []
        names = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(name, str) for name in names):
            raise must_be("controls", given, "names of arms, such as [cosine]", "leave it out for none", of=repr(arm))
        for name in names:
            control = name if name in arms else name + endings[arm]
            if control not in arms or control == arm:
                others = [other for other in arms if other != arm]
                hint = did_you_mean(name, [other for other in others if other != baseline])
                raise LabError(f"The control {name!r} of {arm!r} is not another arm.{hint} They are {', '.join(others)}.")
            controls.append(control)
        controls = [control for control in list_of(controls, f"controls of {arm!r}") if baseline not in (arm, control)]
        fields |= {"controls": controls} if controls else {}


def by_short_names(names: Sequence[str], where: str) -> dict[str, str]:
    """Data sets by the last part of a path or Hub id, as part of the names of files; `where` they are given."""
    found: dict[str, str] = {}
    for name in names:
        last = expanded(name).resolve().name if name else ""
        short = re.sub(r"[^A-Za-z0-9_.@+]+", "-", last).lstrip("_.@+-")[:_LONGEST]
        if not short:
            raise must_be(where, name, "the name of a data set, a folder or a Hub id", "separate several by commas")
        if short in found:
            both = f"{{{short}-1: {{dataset_name: {found[short]}}}, {short}-2: {{dataset_name: {name}}}}}"
            raise LabError(
                f"{where} {','.join(names)}: two data sets would be called {short!r}. Hint: name each once, or name them in "
                f"the study's file, as in datasets: {both}."
            )
        found[short] = name
    return found


def read_datasets(value: Any) -> dict[str, dict[str, Any]]:
    if isinstance(value, (str, list)):
        names = [str(name) for name in list_of(value, "datasets")]
        value = {short: {"dataset_name": name} for short, name in by_short_names(names, "datasets").items()}
    datasets = {}
    for name, fields in _named(_mapping(value, "datasets", "or a list, such as [dino, moons]"), "a data set").items():
        fields = read_fields({} if fields is None else fields, f"the data set {name!r}")
        # Without a source of its own, the name is the source.
        datasets[name] = fields if {"dataset_name", "train_data_dir"} & {*fields} else {"dataset_name": name, **fields}
    return datasets


def read_tuning(value: Any, seeds: tuple[int, ...]) -> Tuning | None:
    """How learning rates are chosen: with seeds other than those of the comparison."""
    if value is None:
        return None
    check_keys(_mapping(value, "tune", "its keys are learning_rates, seeds and metric"), _TUNING, "tune")
    if ("learning_rates" in value) == ("factors" in value):
        raise LabError("tune takes either learning_rates or factors of the arm's own learning rate. Give one of them.")
    own = read_seeds(value.get("seeds", [1000, 1001]), "tune: seeds")
    if shared := sorted(set(own) & set(seeds)):
        raise LabError(f"tune: seeds {shared} are also those of the comparison, which would be biased. Use others.")
    numbers = {name: _numbers(value[name], f"tune: {name}") for name in ("learning_rates", "factors") if name in value}
    metric = str(value.get("metric", "kl"))
    if better_of(metric) != "smaller":
        wanted = "a metric of which smaller values are better"
        raise must_be("metric", metric, wanted, "rates are chosen by its lowest mean", of="tune")
    extensions = value.get("extensions", 3)
    if extensions not in _EXTENSIONS:
        hint = "it limits the rates added on each side while the best one is at the edge"
        raise must_be("extensions", extensions, str(_EXTENSIONS), hint, of="tune")
    return Tuning(numbers.get("learning_rates", ()), numbers.get("factors", ()), own, metric, extensions)
