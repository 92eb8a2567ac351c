"""A held-out loss in a script that has none: rows that are never trained on, and the script's own loss of them."""

import contextlib
import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch

from ..core.errors import LabError
from ..core.files import write_text
from ..core.options import MOST_UPDATES, shown_number
from ..core.streams import SPLIT_SEED, stream_seed
from .clock import HostClock
from .ema_hook import EMAHook
from .generators import find_generators, get_states, seed_all, set_states, variables_of_data
from .held_out_rows import HeldOutRows
from .host_script import HostScript, NotRecognised, called_in
from .loss_code import find_loss_code
from .trained_models import SHARDED

_LARGEST_FRACTION = 0.2


def recognise(script: HostScript) -> str:
    """Where the loss of a held-out batch can be computed; [`NotRecognised`] says why not."""
    code = find_loss_code(script)
    repeats = "; not with rows that repeat" if script.row_counts else ""
    cached = f"; not with {', '.join(script.cached_by_step)} in use" if script.cached_by_step else ""
    found = f"rows are held back ({called_in(code.loader_calls)}), whose loss the loop's code computes"
    return f"{found} (line {code.first_line}){repeats}{cached}"


def check_options(fraction: float | None, steps: int | None) -> None:
    """Before the script starts: both are given, and can be."""
    if (fraction is None) != (steps is None):
        given, missing = ("fraction", "steps") if steps is None else ("steps", "fraction")
        raise LabError(f"--validation_{given} has no effect without --validation_{missing}. Give both, or neither.")
    if fraction is not None and not 0 < fraction <= _LARGEST_FRACTION:
        raise LabError(
            f"--validation_fraction {fraction} is not allowed; use a number above 0, and at most {_LARGEST_FRACTION}."
        )
    if steps is not None and not 1 <= steps <= MOST_UPDATES:
        given = shown_number(steps)
        raise LabError(f"--validation_steps {given} is not allowed; use a whole number from 1 to {MOST_UPDATES:,}.")


class ValidationHook:
    """
    Holds rows back where a script makes its loader, and computes their loss every so many updates, at the start and the end.

    What computes a loss stands in the script's loop. That part of its text runs on held-out batches, with copies of the
    loop's variables, without gradients, with the model in evaluation, and with the same timesteps and noise every time; all
    random states are as they were when it ends. Schedules that follow a loss are shown it.

    Args:
        fraction (`float`): Of the rows, to hold back.
        steps (`int`): Updates between losses.
        ema ([`EMAHook`], *optional*): Whose average is measured where it is swapped in for validation.
    """

    def __init__(self, script: HostScript, clock: HostClock, fraction: float, steps: int, ema: EMAHook | None = None):
        self.script, self.clock, self.run, self.steps, self.ema = script, clock, clock.run, steps, ema
        self.held_out = HeldOutRows(script, clock.run, fraction)
        self.code = find_loss_code(script)
        self.is_active = True
        self.num_seen = 0  # losses
        self.num_updates = 0  # counted here where no schedule counts them
        self.num_steps = 0  # those that a gradient scaler left out are counted, as scripts do for their end
        self.rows: list[dict[str, Any]] = []

    def install(self) -> None:
        data_loader: Any = torch.utils.data.DataLoader
        make = data_loader.__init__

        @functools.wraps(make)
        def make_without_held_out_rows(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_active and self.script.caller(self.code.loader_calls) is not None:
                try:
                    dataset = self.held_out.hold_back(make, dataset, *args, **kwargs)
                except NotRecognised as reason:
                    self.is_active = self.clock.has_loss = False
                    self.run.refuse("--validation_fraction", reason)
            make(loader, dataset, *args, **kwargs)

        data_loader.__init__ = make_without_held_out_rows
        self.clock.has_loss = True
        self.run.on_prepared.append(self._begin)
        self.run.on_update.append(self._after_update)
        self.run.on_step.append(self._after_step)
        self.run.on_end.append(lambda: self.run.accelerator.wait_for_everyone())  # see LogHook._write

    def _begin(self) -> None:
        optimizer, accelerator = self.run.optimizer, self.run.accelerator
        if not self.is_active or optimizer is None or self.rows:
            return
        kind = accelerator.distributed_type.value
        if kind in SHARDED:
            raise LabError(
                f"--validation_fraction: the models are sharded ({kind}), so that no process computes a loss alone. "
                "Leave it out."
            )
        optimizer.register_step_pre_hook(self._before_first_update)

    # --- when ---------------------------------------------------------------------------------------------------------

    def _before_first_update(self, *step: Any) -> None:
        """If a loss cannot be computed, it is an error before anything is trained."""
        if not self.is_active or self.run.num_updates or self.rows:
            return
        # A schedule of the clock counts the update that begins.
        done = self.clock.update - bool(self.clock.watched) if self.clock.counts else self.num_updates
        if not done:  # of a run that is resumed
            self._note(0, self._loss())

    def _after_update(self) -> None:
        if not self.is_active:
            return
        self.num_updates = self.clock.update if self.clock.counts else self.num_updates + 1
        if self.num_updates % self.steps == 0:
            self._validate()

    def _after_step(self) -> None:
        """The last loss, which a multiple of updates need not be."""
        if not self.is_active:
            return
        self.num_steps += 1
        is_last = self.clock.count_updates() in (self.num_steps, self.num_updates)
        if is_last and not (self.rows and self.rows[-1]["update"] == self.num_updates):
            self._validate()

    def _validate(self) -> None:
        loss = self._loss()
        self.clock.follow_loss(loss)
        self._note(self.num_updates, loss)

    def state_dict(self, is_at_end: bool) -> dict[str, Any]:
        """For a checkpoint from which a resume is exact."""
        return {"num_updates": self.num_updates, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates, self.num_steps = state["num_updates"], state["num_steps"]

    # --- the loss -----------------------------------------------------------------------------------------------------

    def _loop(self) -> FrameType:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            in_loop = self.code.first_line <= frame.f_lineno <= self.code.last_line
            if frame.f_code.co_filename == self.script.path and in_loop:
                return frame
            frame = frame.f_back
        raise LabError("--validation_fraction: the script's update is not done in its training loop. Leave it out.")

    def _loss(self) -> float:
        """The mean over all rows that are held back, of all processes."""
        loader = self.held_out.loader
        if loader is None:
            raise LabError("--validation_fraction: the script made no loader to hold rows back from. Leave it out.")
        frame, accelerator = self._loop(), self.run.accelerator
        variables = {**frame.f_globals, **frame.f_locals}
        variables.pop(self.code.counter or "", None)
        for name, value in variables.items():
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                variables[name] = value.module
        models = [*(value for value in variables.values() if isinstance(value, torch.nn.Module)), *self.run.models]
        generators = find_generators({"script": variables, "data": variables_of_data(loader.dataset)})
        total, count = 0.0, 0  # of the rows of this process
        with self._unnoticed(generators), _in_evaluation(models), self._weights(), torch.no_grad():
            for batch in loader:
                size = min(loader.batch_size or 1, len(cast(Any, loader.dataset)) - count)
                total, count = total + self._loss_of(batch, dict(variables)) * size, count + size
        self.num_seen += 1
        sums = torch.tensor([total, count], dtype=torch.float32, device=accelerator.device)
        total, count = accelerator.reduce(sums, "sum").tolist()
        return total / count

    def _loss_of(self, batch: Any, variables: dict[str, Any]) -> float:
        from accelerate.utils import send_to_device

        variables[self.code.batch] = send_to_device(batch, self.run.accelerator.device)
        try:
            exec(self.code.statements, variables)
            return float(eval(self.code.loss, variables))
        except Exception as error:
            raise LabError(
                "--validation_fraction: the script's loss of held-out rows cannot be computed "
                f"({type(error).__name__}: {error}). It may be of more than the batch, such as of latents that were cached. "
                "Leave it out."
            ) from error

    @contextlib.contextmanager
    def _unnoticed(self, generators: dict[str, Any]) -> Iterator[None]:
        """The same random numbers every time, afterwards all generators as they were, and no hook of ours at work."""
        states = get_states(generators)
        self.script.is_measured = True
        try:
            seed_all(stream_seed(SPLIT_SEED, "validation", self.run.accelerator.process_index) % 2**32, generators)
            yield
        finally:
            self.script.is_measured = False
            set_states(states, generators)

    @property
    def _measures_average(self) -> bool:
        return self.ema is not None and "validation" in self.ema.swaps and self.ema.is_active

    def _weights(self) -> contextlib.AbstractContextManager[None]:
        return self.ema.weights() if self.ema is not None and self._measures_average else contextlib.nullcontext()

    # --- what is written ----------------------------------------------------------------------------------------------

    def _note(self, update: int, loss: float) -> None:
        accelerator, path = self.run.accelerator, self._path
        accelerator.log({"validation_loss": loss}, step=update)
        if not self.rows and path is not None and path.exists():  # of the run that is resumed
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self.rows = [row for row in rows if row["update"] < update]
        # JSON has no word for a loss that is not finite.
        self.rows.append({"update": update, "validation_loss": loss if math.isfinite(loss) else None})
        if accelerator.is_main_process and path is not None:
            write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    @property
    def _path(self) -> Path | None:
        folder = self.run.arguments.get("output_dir")
        return Path(folder) / "lrlab" / "validation.jsonl" if folder else None

    def report(self) -> str:
        if not self.is_active:
            return ""
        losses = [(row["validation_loss"], row["update"]) for row in self.rows if row["validation_loss"] is not None]
        if not losses:
            return f"--validation_steps: no {'finite ' * bool(self.rows)}loss of held-out rows was computed."
        (first, first_update), (last, last_update), (best, best_update) = losses[0], losses[-1], min(losses)
        which = ""
        if self.ema is not None and self.ema.is_active:
            which = ", of the average" if self._measures_average else ", of the weights and not of their average"
        rows = f"{self.held_out.num_held_out} of {self.held_out.num_rows} rows{which}"
        text = (
            f"--validation_steps: the held-out loss ({rows}) was {first:.4g} after update {first_update}, lowest after "
            f"update {best_update} ({best:.4g}), and {last:.4g} after update {last_update}."
        )
        if infinite := len(self.rows) - len(losses):
            text += f" It was not finite {infinite} times."
        return text + (f" See {self._path}." if self._path else "")


@contextlib.contextmanager
def _in_evaluation(models: list[torch.nn.Module]) -> Iterator[None]:
    """No dropout in any model, and afterwards each part of it as it was."""
    training = {part: part.training for model in models for part in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part, was_training in training.items():
            part.training = was_training
