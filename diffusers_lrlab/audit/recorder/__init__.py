"""Recorder of the updates of a training program, in the program's own processes.

It runs with Python 3.10 and torch 2.6 or newer, without any other package. It reads, and changes nothing: no random number,
no weight, no signal handler. Its hooks see optimizer steps, backward passes, discarded gradients, clipping, gradient scalers
and schedulers.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .optimizers import Optimizers, Watched
from .records import RecordFile, loss_divisor, readable
from .steps import RealSteps, bare_optimizer

_NUM_LOSSES_EXAMINED = 64


class Recorder:
    """Watches the training of this process."""

    def __init__(self, folder: str):
        self.file = RecordFile(folder)
        self.steps = RealSteps()
        self.steps.after.append(self._record_step)
        self.optimizers = Optimizers(self.file, self.steps)
        self._in_backward = False
        self._num_backward = 0
        self._since_step = 0  # backward passes that no optimizer has used
        self._clip: dict[str, Any] = {}  # of the coming step
        self._clipped_after = 0  # backward passes before the last clipping
        self._divisor: float | None = None
        self._has_scaler = self._has_failed = False
        self._engines: list[str] = []  # whose objects were seen

    def install(self) -> None:
        optimizer, scaler = torch.optim.Optimizer, torch.amp.GradScaler
        before_step, after_step = (functools.partial(self._quietly, call) for call in (self._before_step, self._after_step))
        self._reads_rates = register_optimizer_step_pre_hook(before_step)
        self._wrap(sys.modules["torch.optim.optimizer"], "register_optimizer_step_pre_hook", around=self._register)
        register_optimizer_step_post_hook(after_step)
        self._wrap(optimizer, "__init__", after=lambda this: self.optimizers.find(this))
        self._wrap(optimizer, "zero_grad", before=self._on_zero_grad)
        self._wrap(optimizer, "load_state_dict", around=self._load)
        self._wrap(torch.nn.Module, "zero_grad", before=functools.partial(self._on_zero_grad, None))
        self._wrap(torch.autograd, "backward", around=self._backward)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._wrap(owner, "clip_grad_norm_", around=self._clip_norm)
        if hasattr(torch.nn.utils, "clip_grads_with_norm_"):
            self._wrap(torch.nn.utils, "clip_grads_with_norm_", around=self._clip_by_known_norm)
        self._wrap(scaler, "step", around=self._scaler_step)
        self._wrap(scaler, "scale", before=self._on_scale)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                if "__init__" in vars(kind):
                    self._wrap(kind, "__init__", after=self._for_optimizer(Watched.note_scheduler))
                if "step" in vars(kind):
                    before = self._for_optimizer(Watched.before_scheduler_step)
                    self._wrap(kind, "step", before, self._for_optimizer(Watched.after_scheduler_step))
        atexit.register(self._quietly, self._finish)

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        """Replaces a function by one that also calls `before(self)` and `after(self)`, or `around(original, ...)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if around is not None:
                return around(original, *args, **kwargs)
            if before is not None:
                self._quietly(before, args[0])
            result = original(*args, **kwargs)
            if after is not None:
                self._quietly(after, args[0])
            return result

        setattr(owner, name, call)

    def _register(self, register: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Another hook before steps may set the rate, as the launcher's does, so this one stays the last."""
        handle = register(*args, **kwargs)
        hooks = self._reads_rates.hooks_dict_ref()
        if hooks is not None and self._reads_rates.id in hooks:
            hooks[self._reads_rates.id] = hooks.pop(self._reads_rates.id)
        return handle

    def _quietly(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a part of the recorder, whose first error ends the audit and not the program. Not in compiled code."""
        if torch.compiler.is_compiling() or self._has_failed:
            return None
        try:
            return call(*args)
        except Exception as error:
            self._has_failed = True
            sys.stderr.write(f"lrlab audit: recording ends here: {type(error).__name__}: {error}\n")

    # --- steps --------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self.steps.begin(optimizer)
        self.optimizers.find(optimizer).read_lr()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self.steps.end(optimizer)

    def _record_step(self, optimizer: Any) -> None:
        if self.steps.is_wrapper(optimizer):
            return  # the step of the optimizer inside is recorded
        watched = self.optimizers.find(optimizer)
        # Set by a gradient scaler whose optimizer checks for overflows itself.
        found_inf = None if watched.is_unseen else getattr(optimizer, "found_inf", None)
        watched.record({**self._clip, "d": self._divisor, "i": readable(found_inf)})
        if watched.num_steps == 1:
            self._look_for_engines()
        self._since_step, self._clip, self._divisor = 0, {}, None

    def _notice_unseen_steps(self) -> None:
        """Records steps without hooks, as compiled ones are, by the version counter of a weight."""
        if not self._since_step or self.steps.running:
            return
        for watched in self.optimizers.without_hooks():
            if watched.num_backward and watched.has_new_weights():
                watched.read_lr()
                watched.is_unseen = True
                self.steps.add(watched.optimizer)

    def _look_for_engines(self) -> None:
        """Called where an engine must be alive; `deepspeed` is imported by programs that do not use it, too."""
        engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
        if engine is not None and not self._engines:
            self._engines = ["deepspeed"] if any(issubclass(type(each), engine) for each in gc.get_objects()) else []

    # --- schedulers ---------------------------------------------------------------------------------------------------

    def _for_optimizer(self, call: Callable[[Watched, Any], None]) -> Callable[[Any], None]:
        """A hook for a scheduler's methods, which passes the scheduler to `call` with the record of its optimizer."""

        def notify(scheduler: Any) -> None:
            self._notice_unseen_steps()
            optimizer = bare_optimizer(getattr(scheduler, "optimizer", None))
            if optimizer is not None:
                call(self.optimizers.find(optimizer), scheduler)

        return notify

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _backward(self, backward: Any, /, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # checkpointed activations make a backward pass of their own, perhaps in another thread
            return backward(tensors, *args, **kwargs)
        if self._num_backward < _NUM_LOSSES_EXAMINED or self.optimizers.without_hooks():
            self._quietly(self._before_backward, tensors)
        self._in_backward = True
        try:
            result = backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        self._quietly(self._after_backward)
        return result

    def _before_backward(self, tensors: Any) -> None:
        self._notice_unseen_steps()
        if self._num_backward < _NUM_LOSSES_EXAMINED and not isinstance(tensors, Iterator):
            self._divisor = loss_divisor(tensors, self._has_scaler)

    def _after_backward(self) -> None:
        self._num_backward += 1
        self._since_step += 1
        if self._num_backward == 1:
            self._look_for_engines()
        self.optimizers.count_backward()

    def _on_zero_grad(self, optimizer: Any, module: Any = None) -> None:
        self._notice_unseen_steps()
        watched = None if optimizer is None else self.optimizers.find(optimizer)
        if self._since_step and not self.steps.running:
            self._notice_discarded(watched, module)
        if not self.steps.running:  # closures, too, delete gradients
            if watched is not None:
                watched.num_backward = 0
            else:
                self.optimizers.reset_backward(module)

    def _notice_discarded(self, watched: Watched | None, module: Any) -> None:
        if watched is None:
            parameters = [*module.parameters()]
        else:
            parameters = [weight for group in watched.optimizer.param_groups for weight in group["params"]]
        if all(parameter.grad is None for parameter in parameters):
            return
        # Some optimizers use gradients outside of their step, as SAM does.
        if watched is None or not watched.has_new_weights():
            self.file.write({"discarded": None if watched is None else watched.number, "b": self._since_step})
        self._since_step = 0

    def _clip_norm(self, clip: Any, /, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        norm = clip(parameters, max_norm, *args, **kwargs)
        self._quietly(self._note_clipping, norm, max_norm)
        return norm

    def _clip_by_known_norm(
        self, clip: Any, /, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kw: Any
    ) -> None:
        self._quietly(self._note_clipping, total_norm, max_norm)
        clip(parameters, max_norm, total_norm, *args, **kw)

    def _note_clipping(self, norm: Any, max_norm: Any) -> None:
        # Clipping the parameters of several models one after another counts once.
        is_new = self._clipped_after != self._num_backward
        self._clipped_after = self._num_backward
        self._clip = {"n": readable(norm), "c": readable(max_norm), "k": self._clip.get("k", 0) + is_new}

    def _on_scale(self, scaler: Any) -> None:
        self._has_scaler = True

    def _scaler_step(self, step: Any, scaler: Any, /, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.steps.total
        result = step(scaler, optimizer, *args, **kwargs)
        if self.steps.total == before:
            self._quietly(self._note_skipped, optimizer)
        return result

    def _note_skipped(self, optimizer: Any) -> None:
        if (bare := bare_optimizer(optimizer)) is not None:
            watched = self.optimizers.find(bare)
            self.file.write({"skipped": watched.number, "b": watched.num_backward})
            watched.num_backward = self._since_step = 0
            self._clip = {}

    def _load(self, load: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        watched = self._quietly(self.optimizers.find, optimizer)
        before = self._quietly(Watched.read_peaks, watched)
        result = load(optimizer, *args, **kwargs)
        self._quietly(self._note_load, watched, before)
        return result

    def _note_load(self, watched: Watched, before: list[Any]) -> None:
        after = watched.read_peaks()
        if not any(isinstance(value, torch.Tensor) for value in (*before, *after)):
            self.file.write({"loaded": watched.number, "before": before, "after": after})

    # --- end ----------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if not (self.file.is_used or self._num_backward) and multiprocessing.parent_process() is not None:
            return  # a worker that loads data
        self._notice_unseen_steps()
        self.file.flush()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        end: dict[str, Any] = {"backward": self._num_backward, "unused": self._since_step, "engines": self._engines}
        end["positions"] = self.optimizers.positions()
        self.file.write({"end": {**end, "error": None if error is None else type(error).__name__}})
