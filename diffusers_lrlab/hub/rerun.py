"""Reruns: a run repeated from its record, and compared with it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import write_text
from ..core.options import defaults_of, names_where
from ..core.words import agreeing, counted
from ..training.kinds.select import component_of
from ..training.record_schema import is_number
from .recorded_options import recorded_options
from .records import read_log, read_record

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.05
_EXACT_ENOUGH = 1e-6  # of a learning rate, which is a function of the clock alone


@dataclass(frozen=True)
class Comparison:
    """A run compared with its record: its "learning rate", "losses", "results" and "weights"."""

    settings: dict[str, tuple[Any, Any]]  # options that differ: their values "then" and "now"
    environment: dict[str, tuple[Any, Any]]  # likewise versions, hardware, processes and source
    findings: dict[str, str]  # "equal", or how far apart they are
    largest: dict[str, float | None]  # the largest relative difference; `None` without anything to compare
    tolerance: float  # of losses and results in another environment

    @property
    def is_exact(self) -> bool:
        """Whether everything is equal to the bit, including the log and at least one of results and weights."""
        largest = self.largest
        enough = largest["losses"] is not None and (largest["results"] is not None or largest["weights"] is not None)
        return enough and not self.settings and all(value in (0.0, None) for value in largest.values())

    @property
    def agrees(self) -> bool:
        """
        Whether the record is confirmed: to the bit with equal settings, versions and machine, else within the tolerance.

        In another environment weights need equal shapes only: another order of summation leads to other weights of the same
        quality. Learning rates have a smaller tolerance.
        """
        if self.settings or not self.environment:
            return self.is_exact
        largest = self.largest
        if largest["losses"] is None or not math.isfinite(largest["weights"] or 0.0):
            return False
        bounds = {"learning rate": min(_EXACT_ENOUGH, self.tolerance), "losses": self.tolerance, "results": self.tolerance}
        return all((largest[name] or 0.0) <= bound for name, bound in bounds.items())

    def describe(self) -> str:
        lines = []
        for title, differences in (("Different settings", self.settings), ("Different environment", self.environment)):
            lines += [f"{title}:"] * bool(differences)
            lines += [f"  {name}: {then!r} in the record, {now!r} now" for name, (then, now) in differences.items()]
        lines += [f"{name}: {text}" for name, text in self.findings.items()]
        if self.settings:
            lines.append("This is another run: its settings differ.")
        elif self.is_exact:
            lines.append("The record is reproduced, to the bit.")
        elif self.agrees:
            weights = "" if self.largest["weights"] is None else "; weights are exempt"
            lines.append(f"The record is confirmed within {self.tolerance:.0%}, in another environment{weights}.")
        elif self.largest["losses"] is None:
            lines.append("The record has no log, so there is nothing to confirm.")
        else:
            lines.append("The record is NOT reproduced.")
        return "\n".join(lines)


def repeated_options(folder: Path) -> dict[str, Any]:
    """The options that repeat the run in a folder; raises a `LabError` without a record, or for unknown options."""
    return recorded_options(read_record(folder), str(folder), repeated=True)


def without_replaced(recorded: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Recorded options without those that arguments of the command line replace."""
    from ..training.learning_options import OBJECTIVE_OPTIONS

    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    given = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    kept = {name: value for name, value in recorded.items() if name.removesuffix("_kwargs") not in given or name in given}
    if "pretrained_model_name_or_path" in given:
        kept.pop("revision", None)  # of the recorded one
    if "objective_kwargs" in kept:
        replaced = {
            parameter for options in OBJECTIVE_OPTIONS.values() for parameter, option in options.items() if option in given
        }
        kept["objective_kwargs"] = {name: value for name, value in kept["objective_kwargs"].items() if name not in replaced}
    return kept


def compare_runs(then: Path, now: Path, tolerance: float = TOLERANCE) -> Comparison:
    """Compares the record in the folder `then` with the repeated run in the folder `now`."""
    records = read_record(then), read_record(now)
    rows = read_log(then), read_log(now)
    parts = {
        "learning rate": _compare_rows(*rows, ("lr", "lr_hidden", "beta1")),
        "losses": _compare_rows(*rows, ("loss", "validation_loss", "validation_loss_ema", "grad_norm")),
        "results": _compare_results(*(record["train"].get("results") or {} for record in records)),
        "weights": _compare_weights(then, now),
    }
    findings = {name: text for name, (text, _) in parts.items()}
    largest = {name: number for name, (_, number) in parts.items()}
    return Comparison(_settings(*records), _environment(*records), findings, largest, tolerance)


def _settings(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ; those missing in a record count as their defaults."""
    from ..training.config import TrainingConfig

    defaults = {name: defaults_of(TrainingConfig)[name] for name in names_where(TrainingConfig, is_repeated=True)}
    pairs = {name: (then["config"].get(name, value), now["config"].get(name, value)) for name, value in defaults.items()}
    pairs["images an update, over all processes"] = then["train"]["global_batch"], now["train"]["global_batch"]
    starts = [record["train"].get("started_from", {}).get("sha256") for record in (then, now)]
    pairs["SHA-256 of the weights that it starts from"] = starts[0], starts[1]
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _environment(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Versions, source, hardware and processes that differ."""

    def facts(record: dict[str, Any]) -> dict[str, Any]:
        meta, train = record["meta"], record["train"]
        source = {
            "commit": meta.get("git_commit"),
            "local changes": meta.get("git_dirty"),
            "code of --import": sorted(one["sha256"] for one in meta.get("plugins", [])) or None,
        }
        names = ("processor", "cpu_cores", "platform", "device", "num_processes")
        return {**meta["versions"], **source, **{name: meta.get(name, train.get(name)) for name in names}}

    old, new = facts(then), facts(now)
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _apart(old: float, new: float) -> float:
    """The difference of two finite numbers, relative to the first."""
    if old == new:
        return 0.0
    return abs(new - old) / abs(old) if old else math.inf


def _compare_rows(
    then: list[dict[str, Any]], now: list[dict[str, Any]], columns: tuple[str, ...]
) -> tuple[str, float | None]:
    """Columns of the log, row by row; differences are relative to the value of the record in that row."""
    if not then:
        return "the record has no log", None
    if [row["update"] for row in then] != [row["update"] for row in now]:
        return f"{counted(len(then), 'row')} of the log in the record and {len(now)} now, at other updates", math.inf
    largest, first, where = 0.0, None, ""
    for column in columns:
        for old, new in zip(then, now, strict=True):
            if (column in old) != (column in new):
                return f"{column} is in only one of the logs", math.inf
            apart = _apart(old[column], new[column]) if column in old else 0.0
            if apart > 0 and (first is None or old["update"] < first):
                first = old["update"]
            if apart > largest:
                largest, where = apart, f"{column} at update {old['update']}: {old[column]:.6g} then, {new[column]:.6g} now"
    if first is None:
        return "equal", 0.0
    return f"different from update {first} on, by at most {largest:.2g} of the value ({where})", largest


def _compare_results(then: dict[str, Any], now: dict[str, Any]) -> tuple[str, float | None]:
    numbers = [name for name in then if is_number(then[name])]
    if not numbers:
        return "the record has none", None
    if missing := [name for name in numbers if not is_number(now.get(name))]:
        return f"{missing[0]} is in the record only", math.inf
    apart = {name: _apart(then[name], now[name]) for name in numbers}
    worst = max(apart, key=lambda name: apart[name])
    if apart[worst] == 0:
        return "equal", 0.0
    return f"{worst}: {then[worst]:.6g} then, {now[worst]:.6g} now ({apart[worst]:.2g} apart, the most)", apart[worst]


def _weights_files(folder: Path) -> list[Path]:
    """Files of weights, several if they are sharded."""
    found = (folder / component_of(read_record(folder)["config"])).glob("*.safetensors")
    return sorted(found)


def _compare_weights(then: Path, now: Path) -> tuple[str, float | None]:
    """All tensors; the difference is the norm of the differences, relative to that of the record's weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [_weights_files(folder) for folder in (then, now)]
    if not files[0]:
        return "the record has none", None
    if not files[1]:
        return "in the record only", math.inf
    try:
        old, new = ({name: tensor for shard in shards for name, tensor in load_file(shard).items()} for shards in files)
    except (SafetensorError, OSError) as error:
        return f"cannot be read ({error})", math.inf
    if {name: tensor.shape for name, tensor in old.items()} != {name: tensor.shape for name, tensor in new.items()}:
        return "of other shapes", math.inf
    if others := [name for name in old if old[name].dtype != new[name].dtype]:
        return f"{others[0]} is {old[others[0]].dtype} in the record, and {new[others[0]].dtype} now", math.inf
    different = [name for name in old if not _bits(old[name]).equal(_bits(new[name]))]
    if not different:
        return "equal", 0.0
    squares = (
        [_square(_numbers(old[name]) - _numbers(new[name])) for name in old],
        [_square(_numbers(old[name])) for name in old],
    )
    apart, norm = map(math.sqrt, map(sum, squares))
    largest = apart / norm if norm and math.isfinite(apart / norm) else math.inf
    what = "has {largest:.2g} of their norm" if math.isfinite(largest) else "is not finite"
    differ = agreeing(len(different), "differs", "differ")
    return (
        f"{len(different)} of {counted(len(old), 'tensor')} {differ}; the difference {what.format(largest=largest)}",
        largest,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN is equal to itself, and every dtype can be compared."""
    import torch

    return tensor.flatten().view(torch.uint8)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _square(numbers: torch.Tensor) -> float:
    return float(numbers.abs().square().sum())


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Writes a comparison into the folder of the repeated run, as `lrlab/rerun.json`."""
    data = dataclasses.asdict(comparison) | {"is_exact": comparison.is_exact, "agrees": comparison.agrees}
    data["largest"] = {name: str(value) if value == math.inf else value for name, value in comparison.largest.items()}
    write_text(folder / "lrlab" / "rerun.json", json.dumps(data, indent=2, allow_nan=False, default=str) + "\n")
