"""The script's own loss of rows that it does not train on, with the same timesteps and noise every time."""

import contextlib
import copy
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import torch

from ...core.errors import LabError
from ...core.streams import SPLIT_SEED, stream_seed
from ...core.words import counted
from ..script.loss_code import find_loss_code
from ..script.source import HostScript, NotRecognised
from .generators import find_generators, get_states, seed_all, set_states, variables_of_data
from .held_out_rows import HeldOutRows
from .run import HostRun
from .trained_models import SHARDED


class HeldOutLoss:
    """
    Holds rows back where a script makes its loader, and computes their loss.

    What computes a loss stands in the script's loop. That part of its text runs on held-out batches, with copies of the
    loop's variables, without gradients, with the model in evaluation, and with the same timesteps and noise every time; all
    random states are as they were when it ends.

    Args:
        fraction (`float`): Of the rows, to hold back.
        refuse: Called with the reason where the script's data cannot be held back.
        num_draws (`int`, *optional*): Of timesteps and noise: at most so many rows are held back, and fewer rows are each
            computed several times. Once if not given.
    """

    def __init__(
        self,
        script: HostScript,
        run: HostRun,
        fraction: float,
        refuse: Callable[[NotRecognised], None],
        num_draws: int | None = None,
    ):
        self.script, self.run, self.refuse, self.num_draws = script, run, refuse, num_draws
        self.code = find_loss_code(script)
        self.rows = HeldOutRows(script, run, fraction, num_draws, self.code.of_whole_batches)
        self.is_active = True
        self.num_seen = 0  # losses

    def install(self) -> None:
        def make_without_held_out_rows(make: Any, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_active and self.script.caller(self.code.loader_calls) is not None:
                try:
                    dataset = self.rows.hold_back(make, dataset, *args, **kwargs)
                except NotRecognised as reason:
                    self.is_active = False
                    self.refuse(reason)
            make(loader, dataset, *args, **kwargs)

        self.run.patches.wrap(torch.utils.data.DataLoader, "__init__", make_without_held_out_rows)
        self.run.on_prepared.append(self._check_models)

    def _check_models(self) -> None:
        kind = self.run.accelerator.distributed_type.value
        if self.is_active and self.run.optimizer is not None and kind in SHARDED:
            raise LabError(
                f"--validation_fraction: the models are sharded ({kind}), so that no process computes a loss alone. "
                "Leave it out."
            )

    def describe(self) -> str:
        """What it is the loss of."""
        rows, num = self.rows, self._draws_per_batch
        draws = "fixed timesteps and noise" if num == 1 else f"{num} fixed draws of timesteps and noise for each"
        return f"{rows.num_held_out} of {counted(rows.num_rows, 'row')}, which are not trained on, with {draws}"

    @property
    def _draws_per_batch(self) -> int:
        return math.ceil((self.num_draws or 1) / self.rows.num_held_out)

    def compute(self) -> float:
        """The mean over all rows that are held back, of all processes: the same number in each."""
        loader = self.rows.loader
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
        with self._unnoticed(generators), _in_evaluation(models), torch.no_grad():
            for batch in loader:
                size = min(loader.batch_size or 1, len(cast(Any, loader.dataset)) - count)
                total, count = total + self._loss_of(batch, variables) * size, count + size
        self.num_seen += 1
        sums = torch.tensor([[total, count]], dtype=torch.float32, device=accelerator.device)
        total, count = accelerator.gather(sums).sum(0).tolist()
        return total / count

    def _loop(self) -> FrameType:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            in_loop = self.code.first_line <= frame.f_lineno <= self.code.last_line
            if frame.f_code.co_filename == self.script.path and in_loop:
                return frame
            frame = frame.f_back
        raise LabError("--validation_fraction: the script's update is not done in its training loop. Leave it out.")

    def _loss_of(self, batch: Any, variables: dict[str, Any]) -> float:
        """The mean over its draws."""
        from accelerate.utils import send_to_device

        num, losses = self._draws_per_batch, []
        try:
            for _ in range(num):
                own = copy.deepcopy(batch) if num > 1 else batch  # which the script may change
                changed = variables | {self.code.batch: send_to_device(own, self.run.accelerator.device)}
                exec(self.code.statements, changed)
                losses.append(float(eval(self.code.loss, changed)))
        except Exception as error:
            raise LabError(
                f"--validation_fraction: the script's loss of held-out rows cannot be computed{self._statement_of(error)} "
                f"({type(error).__name__}: {error}). What this statement needs may follow from more than the batch, or from "
                "the number of its rows. Leave it out, or hold back whole batches."
            ) from error
        return sum(losses) / num

    def _statement_of(self, error: Exception) -> str:
        """Where in the script's text an error was raised, with that line."""
        lines = [level.lineno for level in traceback.extract_tb(error.__traceback__) if level.filename == self.code.name]
        if not lines or lines[-1] is None:
            return ""
        with open(self.script.path, encoding="utf-8") as file:
            text = file.read().splitlines()[lines[-1] - 1].strip()
        return f" at its line {lines[-1]}, `{text}`"

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
