"""A learning rate range test on the updates of a third-party script: the learning rate rises while losses are read.

The test is the first updates of a process that never trains: an exception ends it, so nothing has to be restored. The
script's output during the test goes to a temporary folder, or is not written.
"""

import argparse
import shutil
import tempfile
from typing import Any

import torch
from torch.optim import Optimizer

from ...core.errors import LabError
from ..host.run import HostRun
from ..host.source import HostScript, NotRecognised, lines_of
from ..installed_hooks import Hook, Host
from . import optimizer

_UNSTABLE = 32  # consecutive updates without a finite fp16 gradient, by which the loss scale falls from 65536 to 0


class RangeTestDone(BaseException):
    """Leaves the script; not an `Exception`, which a script may catch."""


def recognise(script: HostScript) -> str:
    optimizer.recognise(script)
    if not script.calls("backward"):
        raise NotRecognised("it does not call accelerator.backward, where losses are read")
    if not script.mentions("output_dir"):
        raise NotRecognised("it has no --output_dir for the result")
    return f"losses are read at accelerator.backward ({lines_of(script.calls('backward'))})"


def make(host: Host) -> Hook:
    return FindLrHook(host.script, host.run, host.range_test)


class FindLrHook:
    """Sets the optimizer's learning rates to those of a test, and passes the script's losses to the test."""

    def __init__(self, script: HostScript, run: HostRun, test: Any):
        try:
            recognise(script)
        except NotRecognised as reason:
            raise LabError(f"--find_lr cannot be used in this script: {reason}.") from None
        self.script, self.run, self.test = script, run, test
        self.num_seen = 0  # updates
        self._losses: list[torch.Tensor] = []  # of the micro-batches since the last update
        self._ratios: list[float] = []  # of each group's learning rate to the first nonzero one
        self.lr_per_option = 1.0  # the optimizer's learning rate over the script's --learning_rate
        self._temporary: str | None = None

    def install(self) -> None:
        from accelerate import Accelerator

        patches = self.run.patches
        self.run.on_parsed.append(self._change_arguments)
        self.run.on_prepared.append(self._begin)
        self.run.on_update.append(self._after_update)
        patches.wrap(Accelerator, "backward", self._read_loss, self.script.calling("backward"))
        # No trackers, which would start a run, and no checkpoints.
        for name in ("init_trackers", "log", "save_state", "save_model"):
            patches.replace(Accelerator, name, _nothing)
        patches.replace(Accelerator, "get_tracker", _Silent())

    def _change_arguments(self, namespace: argparse.Namespace) -> None:
        """Makes the run as long as the test needs, with a temporary output folder."""
        given = vars(namespace)
        if "output_dir" not in given:
            return  # not the parser of the training
        if given.get("resume_from_checkpoint"):
            raise LabError("--find_lr tests rates from the start of a training. Remove --resume_from_checkpoint.")
        self._temporary = self._temporary or tempfile.mkdtemp(prefix="find-lr-")
        changed: dict[str, Any] = {"output_dir": self._temporary, "push_to_hub": False}
        length = next((name for name in ("max_train_steps", "num_epochs", "num_train_epochs") if name in given), None)
        if length:
            changed[length] = len(self.test.lrs)
        for name in changed.keys() & given.keys():
            setattr(namespace, name, changed[name])

    def _begin(self) -> None:
        optimizer = self.run.optimizer
        if optimizer is None or self._ratios:
            return
        if self._temporary is None:
            raise LabError(
                "--find_lr: this script does not parse --output_dir with argparse, so its files could not be removed."
            )
        self.test.begin(optimizer)
        lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        base = next((lr for lr in lrs if lr), 0.0)
        if not base:
            raise LabError("--find_lr: all learning rates of the script are 0 and cannot rise. Give it a --learning_rate.")
        self._ratios = [lr / base for lr in lrs]
        self.lr_per_option = base / (self.run.arguments.get("learning_rate") or base)
        optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Optimizer, *step: Any) -> None:
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = self.test.lr * ratio

    def _read_loss(self, backward: Any, accelerator: Any, loss: torch.Tensor, /, **kwargs: Any) -> None:
        self._losses.append(loss.detach())
        if len(self._losses) > _UNSTABLE * accelerator.gradient_accumulation_steps:
            self.test.fail()
            raise RangeTestDone
        backward(accelerator, loss, **kwargs)

    def _after_update(self) -> None:
        if not self._losses or not self._ratios:
            return
        self.num_seen += 1
        losses, self._losses = self._losses, []
        mean = torch.stack([loss.float().mean() for loss in losses]).mean()
        # The loss is the same in all processes, so that they end at the same update.
        if not self.test.add(self.run.accelerator.gather(mean[None]).double().mean().item()):
            raise RangeTestDone

    def end(self) -> None:
        """Frees the process group, in place of the script, which all processes have left early."""
        if self.run.accelerator is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            from accelerate.state import PartialState

            self.run.accelerator.wait_for_everyone()
            PartialState().destroy_process_group()

    def report(self) -> str:
        """Empty: the test prints its result."""
        return ""

    def remove(self) -> None:
        """Removes the script's output."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Silent:
    """A tracker whose every method does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self
