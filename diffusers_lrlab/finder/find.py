"""The finder as a whole: from a configuration, or a trainer, to a learning rate and what speaks for it."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.environment import describe_environment, launch_command
from ..core.errors import LabError
from ..core.files import write_text
from ..core.options import defaults_of, names_where
from ..optimizers.entries import OPTIMIZERS
from ..training.config import TrainingConfig
from ..training.run_folder import FINDER_FILES, RunFolder, check_fresh
from .range_test import FinderConfig, Sweep, range_test
from .saved_result import deciding
from .snapshot import random_states, restore_random_states
from .suggestions import RULES, Suggestion, combine, disagreement

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.loading import TrainingData
    from ..training.plan import Plan
    from ..training.trainer import Trainer

_RANGE = (1e-7, 1e-2)  # for AdamW


@dataclass(frozen=True)
class FinderResult:
    """
    What the finder found.

    Args:
        settings ([`FinderConfig`]): How it looked, with both rates.
        sweeps (`tuple` of [`Sweep`]): One for each test.
        suggestions (`dict`): From the names of rules to their [`Suggestion`] over all tests.
        seconds (`float`): That it took.
        about (`dict`): What was tested: data, model, optimizer, batch, and on what machine.
    """

    settings: FinderConfig
    sweeps: tuple[Sweep, ...]
    suggestions: dict[str, Suggestion]
    seconds: float
    about: dict[str, Any]

    @property
    def suggestion(self) -> Suggestion:
        """That of the rule that was asked for."""
        return self.suggestions[self.settings.rule]

    @property
    def lr(self) -> float:
        """
        Its learning rate, with two significant digits.

        Raises:
            LabError: if it has none.
        """
        if self.suggestion.lr is None:
            raise LabError(
                f"The finder has no learning rate by {self.settings.rule!r}: {self.suggestion.reason}. Give --learning_rate "
                "a number, or try training_scripts/find_lr.py with another range or --rule."
            )
        return float(f"{self.suggestion.lr:.1e}")

    def describe(self) -> str:
        """In words, a line for each rule."""
        settings, losses = self.settings, self.sweeps[0].losses
        reached = max((float(sweep.lrs[-1]) for sweep in self.sweeps if len(sweep.lrs)), default=0.0)
        start = f"; loss {losses[0]:.3g} at the start" if len(losses) else ""
        beyond = f", then on to {reached:.3g}" if reached > 1.01 * settings.end_lr else ""
        lines = [
            f"{len(self.sweeps)} tests from {settings.start_lr:.3g} to {settings.end_lr:.3g} in {settings.num_updates} "
            f"updates{beyond}, {self.seconds:.1f} s{start}"
        ]
        for name, suggestion in self.suggestions.items():
            interval = "" if suggestion.interval is None else " ({:.2g} to {:.2g})".format(*suggestion.interval)
            rate = "none" if suggestion.lr is None else f"{suggestion.lr:.2g}{interval}"
            lines.append(f"{name:>13}  {rate}: {suggestion.reason}")
        lines += sorted({sweep.ended[0].upper() + sweep.ended[1:] + "." for sweep in self.sweeps if sweep.ended})
        if apart := disagreement(self.suggestions):
            lines.append(apart)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As data; a loss that is not finite is `None`."""
        return {
            "learning_rate": None if self.suggestion.lr is None else self.lr,
            "settings": dataclasses.asdict(self.settings),
            "suggestions": {name: suggestion._asdict() for name, suggestion in self.suggestions.items()},
            "disagreement": disagreement(self.suggestions),
            "sweeps": [
                {
                    "lrs": sweep.lrs.tolist(),
                    "losses": _finite(sweep.losses),
                    "losses_by_noise": [_finite(row) for row in sweep.bins],
                    "num_updates": sweep.num_updates,
                    "ended": sweep.ended,
                }
                for sweep in self.sweeps
            ],
            "seconds": self.seconds,
            "about": self.about,
        }

    def save(self, folder: Path) -> None:
        """Writes `lr_finder.json` and `lr_finder.png`."""
        from .plot import plot_finder

        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FINDER_FILES[0], json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        plot_finder(self, folder / FINDER_FILES[1])


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def find_lr(config: TrainingConfig, settings: FinderConfig | None = None) -> FinderResult:
    """
    Tests learning rates with the model, data, optimizer and way of learning of a run, without starting it.

    Args:
        config ([`TrainingConfig`]): Of the run. Its learning rate and schedule do not matter.
        settings ([`FinderConfig`], *optional*): How to look.

    Returns:
        [`FinderResult`]: with `.lr`, `.describe()` and `.save(folder)`.

    Raises:
        LabError: if something cannot be done as asked; before data is read or a model is built where that is possible.
    """
    from ..training.prepare import prepare

    settings = settle(settings or FinderConfig(), config.optimizer)
    return find_rate_for(*prepare(config), settings)


def find_lr_for_folder(config: TrainingConfig, settings: FinderConfig | None = None) -> tuple[FinderResult, Path]:
    """
    [`find_lr`] with its result in `lrlab/` of the folder of the run, where the run and its card find it.

    Raises:
        LabError: also if that folder holds something else.
    """
    from ..training.prepare import prepare_resolved, resolve_and_check

    settings = settle(settings or FinderConfig(), config.optimizer)
    changed = {name for name, default in defaults_of(TrainingConfig).items() if getattr(config, name) != default}
    for name in names_where(TrainingConfig, finder="refuses"):
        if name in changed:
            raise LabError(f"--{name} is for training, and has no effect on the search for a learning rate. Leave it out.")
    idle = [f"--{name}" for name in names_where(TrainingConfig, finder="ignores") if name in changed]
    resolved = resolve_and_check(config)
    check_fresh(RunFolder(Path(resolved.output_dir)), overwrite=False)
    plan, data, accelerator = prepare_resolved(resolved)
    folder = RunFolder(Path(plan.config.output_dir), accelerator.is_main_process)
    result = find_rate_for(plan, data, accelerator, settings)
    if accelerator.is_main_process:
        if idle:
            sys.stderr.write(f"Of the run, and without effect on the search for its learning rate: {', '.join(idle)}.\n")
        result.save(folder.lab)
    return result, folder.path


def find_rate_for(
    plan: Plan, data: TrainingData, accelerator: Accelerator, settings: FinderConfig | None = None
) -> FinderResult:
    """[`find_lr`] of a run that is planned; the accelerator is as it was afterwards."""
    from ..training.trainer import Trainer

    states = random_states()  # which making a model sets
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(plan, data, accelerator, RunFolder(Path(folder), accelerator.is_main_process))
        try:
            return find_lr_of(trainer, settings)
        finally:
            trainer.release()
            restore_random_states(states)


def find_lr_of(
    trainer: Trainer, settings: FinderConfig | None = None, batches: Iterable[torch.Tensor] | None = None
) -> FinderResult:
    """
    Tests learning rates with a trainer, which afterwards is in the state that it is in now, to the bit.

    Args:
        trainer ([`Trainer`]): At whatever update.
        settings ([`FinderConfig`], *optional*): How to look.
        batches (`Iterable[torch.Tensor]`, *optional*): See [`range_test`]; of a single test, then.
    """
    settings = settle(settings or FinderConfig(), trainer.config.optimizer)
    started, sweeps = time.perf_counter(), []
    repeats = settings.repeats if batches is None else 1
    quiet = not trainer.accelerator.is_main_process
    for repeat in tqdm(range(repeats), desc="find learning rate", unit="test", disable=quiet or not sys.stderr.isatty()):
        sweeps.append(range_test(trainer, settings, repeat, batches))
    suggestions = {name: combine([rule(sweep.lrs, sweep.losses) for sweep in sweeps]) for name, rule in RULES.items()}
    return FinderResult(settings, tuple(sweeps), suggestions, time.perf_counter() - started, _about(trainer))


def settle(settings: FinderConfig, optimizer: str) -> FinderConfig:
    """
    Settings with both rates, which depend on the scale of the optimizer.

    Raises:
        LabError: for settings that cannot be, and for an optimizer that finds its rate by itself.
    """
    settings.check()
    name = optimizer.partition(":")[0]
    facts = OPTIMIZERS[name].facts if name in OPTIMIZERS else {}
    if "learning_rate" in facts:
        raise LabError(f"{name!r} finds its learning rate by itself: leave --learning_rate at {facts['learning_rate']:g}.")
    scale = facts.get("learning_rate_factor", 1)
    low, high = (end * scale for end in _RANGE)
    settled = dataclasses.replace(settings, start_lr=settings.start_lr or low, end_lr=settings.end_lr or high)
    settled.check()
    return settled


def _about(trainer: Trainer) -> dict[str, Any]:
    config, plan, meta = trainer.config, trainer.plan, describe_environment()
    return {
        "data": trainer.data.name,
        "model": plan.model_config,
        "num_parameters": plan.num_parameters,
        "deciding": deciding(config.to_dict(), plan.num_parameters, plan.layout.global_batch),
        "optimizer": config.optimizer,
        "optimizer_kwargs": config.optimizer_kwargs,
        "global_batch": plan.layout.global_batch,
        "seed": config.seed,
        "at_update": trainer.update,
        "command": launch_command(),
        "meta": meta,
    }
