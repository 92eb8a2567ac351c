"""The script's own loss of rows that it does not train on, with the same timesteps and noise every time."""

import contextlib
import copy
import math
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
from .run import HostRun, calling_frames
from .trained_models import SHARDED


class HeldOutLoss:
    """
    Holds out rows where a script makes its loader, and computes their loss.

    The part of the script's loop that computes the loss runs on held-out batches, with copies of the loop's variables,
    without gradients, and with the model in evaluation mode. All random states are restored afterwards.

    `refuse` is called with the reason if the script's data cannot be held out. With `num_draws` of timesteps and noise, at
    most that many rows are held out, and fewer rows are each computed several times.
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
        self.rows = HeldOutRows(script, run, fraction, num_draws, self.code.sized_statement)
        self.is_active = True
        self.num_seen = 0  # losses

    def install(self) -> None:
        def make_without_held_out_rows(make: Any, loader: Any, dataset: Any, /, *args: Any, **kwargs: Any) -> None:
            if self.is_active and self.script.caller(self.code.loader_calls) is not None:
                try:
                    dataset = self.rows.split(make, dataset, *args, **kwargs)
                except NotRecognised as reason:
                    self.is_active = False
                    self.refuse(reason)
            make(loader, dataset, *args, **kwargs)

        self.run.patches.wrap(torch.utils.data.DataLoader, "__init__", make_without_held_out_rows)
        self.run.on_prepared.append(self._check_models)

    def _check_models(self) -> None:
        strategy = self.run.accelerator.distributed_type.value
        if self.is_active and self.run.optimizer is not None and strategy in SHARDED:
            raise LabError(
                f"--validation_fraction: the models are sharded ({strategy}), so no process can compute a loss alone. "
                "Remove --validation_fraction."
            )

    def describe(self) -> str:
        rows, num = self.rows, self._draws_per_batch
        draws = "fixed timesteps and noise" if num == 1 else f"{num} fixed draws of timesteps and noise for each"
        return f"{rows.num_held_out} of {counted(rows.num_rows, 'row')}, which are not trained on, with {draws}"

    @property
    def _draws_per_batch(self) -> int:
        return math.ceil((self.num_draws or 1) / self.rows.num_held_out)

    def compute(self) -> float:
        """The mean over the held-out rows of all processes: the same number in each process."""
        loader = self.rows.loader
        if loader is None:
            raise LabError(
                "--validation_fraction: the script made no loader to hold rows out of. Remove --validation_fraction."
            )
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
        """The frame of the script that runs its training loop."""
        for frame in calling_frames():
            in_loop = self.code.first_line <= frame.f_lineno <= self.code.last_line
            if frame.f_code.co_filename == self.script.path and in_loop:
                return frame
        raise LabError(
            "--validation_fraction: the script's update is outside of its training loop. Remove --validation_fraction."
        )

    def _loss_of(self, batch: Any, variables: dict[str, Any]) -> float:
        """The mean loss of a batch over its draws."""
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
                f"({type(error).__name__}: {error}). This statement may depend on more than the batch, or on the number of "
                "its rows. Hold out whole batches, or remove --validation_fraction."
            ) from error
        return sum(losses) / num

    def _statement_of(self, error: Exception) -> str:
        """The line of the script's text that raised an error."""
        lines = [level.lineno for level in traceback.extract_tb(error.__traceback__) if level.filename == self.code.name]
        if not lines or lines[-1] is None:
            return ""
        with open(self.script.path, encoding="utf-8") as file:
            text = file.read().splitlines()[lines[-1] - 1].strip()
        return f" at its line {lines[-1]}, `{text}`"

    @contextlib.contextmanager
    def _unnoticed(self, generators: dict[str, Any]) -> Iterator[None]:
        """The same random numbers every time, no hook active, and all generators restored afterwards."""
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
    """All models in evaluation mode, and each module's own mode restored afterwards."""
    training = {part: part.training for model in models for part in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part, was_training in training.items():
            part.training = was_training
