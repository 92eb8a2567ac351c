"""A held-out loss for a script that has none: rows that are never trained on, and the script's own loss of them."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, cast

from ...core.errors import must_be
from ...core.files import write_text
from ...core.words import counted, times
from ..host.files import problem_with
from ..host.held_out_loss import HeldOutLoss
from ..host.hook import Host, StatefulHook
from ..script.loss_code import find_loss_code
from ..script.source import HostScript, NotRecognised, lines_of
from .clock import HostClock, clock_of
from .ema import EMAHook
from .width_sweep import sweep_widths


def recognise(script: HostScript) -> str:
    code = find_loss_code(script)
    repeats = "; not with repeated rows" if script.index_moduli else ""
    cached = f"; not with {', '.join(script.indexed_by_step)} in use" if script.indexed_by_step else ""
    found = f"rows are held out ({lines_of(code.loader_calls)}), and the training loop's code computes their loss"
    return f"{found} (line {code.first_line}){repeats}{cached}"


def make(host: Host) -> StatefulHook:
    ema, options = cast(EMAHook | None, host.hooks.get("ema")), host.options
    if options.ema_sweep is not None and (ema is None or ema.averages.posthoc is None):
        hint = "add --ema posthoc, or remove --ema_sweep"
        raise must_be("--ema_sweep", options.ema_sweep, "given with --ema posthoc, whose widths it measures", hint)
    of_data = options.validation_fraction, options.validation_steps
    return ValidationHook(host.script, clock_of(host), *of_data, ema, options.ema_sweep)


class ValidationHook:
    """
    Computes the loss of a held-out `fraction` of the rows at the start, every `steps` updates and at the end, and passes it
    to schedules that follow a loss. It is the loss of the average of `ema`, if that replaces the weights in validation. At
    the end, `to_sweep` widths of the post-hoc average are measured too.
    """

    def __init__(
        self,
        script: HostScript,
        clock: HostClock,
        fraction: float,
        steps: int,
        ema: EMAHook | None = None,
        to_sweep: int | None = None,
    ):
        self.clock, self.run, self.steps, self.ema = clock, clock.run, steps, ema
        self.to_sweep = to_sweep
        self.best: tuple[float, float] | None = None  # width and loss
        self.held_out = HeldOutLoss(script, clock.run, fraction, self._refuse)
        self.num_updates = 0  # counted here if no schedule counts them
        self.num_steps = 0  # with updates that a gradient scaler skipped, by which scripts end
        self.rows: list[dict[str, Any]] = []

    def install(self) -> None:
        self.held_out.install()
        self.clock.has_loss = True
        self.run.on_prepared.append(self._begin)
        self.run.on_update.append(self._after_update)
        self.run.on_step.append(self._after_step)
        self.run.on_end.append(lambda: self.run.accelerator.wait_for_everyone())  # see LogHook._write

    def _refuse(self, reason: NotRecognised) -> None:
        self.clock.has_loss = False
        self.run.refuse("--validation_fraction", reason)

    def _begin(self) -> None:
        if self.held_out.is_active and self.run.optimizer is not None and not self.rows:
            self.run.optimizer.register_step_pre_hook(self._before_first_update)

    @property
    def num_seen(self) -> int:
        return self.held_out.num_seen

    # --- when ---------------------------------------------------------------------------------------------------------

    def _before_first_update(self, *step: Any) -> None:
        """Computes the first loss, so that an error comes before anything is trained."""
        if not self.held_out.is_active or self.run.num_updates or self.rows:
            return
        # A schedule on the clock has already counted the coming update.
        done = self.clock.update - self.clock.has_begun if self.clock.counts else self.num_updates
        if not done:  # otherwise the run is resumed
            self._add_row(0, self._loss())

    def _after_update(self) -> None:
        if not self.held_out.is_active:
            return
        self.num_updates = self.clock.update if self.clock.counts else self.num_updates + 1
        if self.num_updates % self.steps == 0:
            self._validate()

    def _after_step(self) -> None:
        """Computes the last loss, if the number of updates is not a multiple of `steps`."""
        if not self.held_out.is_active:
            return
        self.num_steps += 1
        is_last = self.clock.count_updates() in (self.num_steps, self.num_updates)
        if is_last and not (self.rows and self.rows[-1]["update"] == self.num_updates):
            self._validate()
        if is_last and self.to_sweep and self.ema is not None and self.ema.average is not None and self.best is None:
            self.best = sweep_widths(self.ema, self.to_sweep, self.held_out.compute)

    def _validate(self) -> None:
        loss = self._loss()
        self.clock.follow_loss(loss)
        self._add_row(self.num_updates, loss)

    def _loss(self) -> float:
        average = self._average
        with average.weights() if average is not None else contextlib.nullcontext():
            return self.held_out.compute()

    @property
    def _average(self) -> EMAHook | None:
        """The hook whose average is measured."""
        ema = self.ema
        return ema if ema is not None and "validation" in ema.swaps and ema.is_active else None

    def state_dict(self, is_at_end: bool) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates, self.num_steps = state["num_updates"], state["num_steps"]

    # --- written ------------------------------------------------------------------------------------------------------

    def _add_row(self, update: int, loss: float) -> None:
        path = self._path
        self.run.log({"validation_loss": loss}, update)
        if not self.rows and path is not None and path.exists():  # of the run that is resumed
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self.rows = [row for row in rows if row["update"] < update]
        # JSON cannot hold a loss that is not finite.
        self.rows.append({"update": update, "validation_loss": loss if math.isfinite(loss) else None})
        if self.run.accelerator.is_main_process and path is not None:
            write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))

    @property
    def _path(self) -> Path | None:
        return self.run.lab_folder / "validation.jsonl" if self.run.arguments.get("output_dir") else None

    def report(self) -> str:
        if not self.held_out.is_active:
            return ""
        losses = [(row["validation_loss"], row["update"]) for row in self.rows if row["validation_loss"] is not None]
        if not losses:
            return f"--validation_steps: no {'finite ' * bool(self.rows)}loss of held-out rows was computed."
        (first, first_update), (last, last_update), (best, best_update) = losses[0], losses[-1], min(losses)
        weights = ""
        if self.ema is not None and self.ema.is_active:
            weights = ", of the average" if self._average is not None else ", of the weights, not of their average"
        rows = f"{self.held_out.rows.num_held_out} of {counted(self.held_out.rows.num_rows, 'row')}{weights}"
        text = (
            f"--validation_steps: the held-out loss ({rows}) was {first:.4g} after update {first_update}, lowest after "
            f"update {best_update} ({best:.4g}), and {last:.4g} after update {last_update}."
        )
        if self.best is not None:
            width, loss = self.best
            text += f" Of {self.to_sweep} widths of the average, it is lowest for sigma_rel {width:.4g}, {loss:.4g}:"
            text += f" lrlab ema {self.run.lab_folder.parent} --sweep."
        if infinite := len(self.rows) - len(losses):
            text += f" It was not finite {times(infinite)}."
        if self._path is None:
            return text
        problem = problem_with(self._path)
        return f"{text} They are lost: {problem}." if problem else f"{text} See {self._path}."
