"""Hooks of the recorder: optimizer steps, backward passes, discarded gradients, clipping, scalers and schedulers."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .losses import loss_divisor
from .optimizers import Optimizers, Watched
from .records import RecordFile, readable
from .schedulers import Schedulers, bare_optimizer

_NUM_LOSSES_EXAMINED = 64


class Recorder:
    """Watches the training of this process."""

    def __init__(self, folder: str):
        self.file = RecordFile(folder)
        self.schedulers = Schedulers()
        self.optimizers = Optimizers(self.file, self.schedulers)
        self._in_backward = False
        self._num_backward = 0
        self._since_step = 0  # backward passes that no optimizer has used
        self._clip: dict[str, Any] = {}  # of the coming step
        self._divisor: float | None = None
        self._num_steps = 0
        self._steps: list[Watched] = []  # that are running: an optimizer's step may call another's
        self._has_scaler = False

    def install(self) -> None:
        wrap, optimizer = _wrap, torch.optim.Optimizer
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(optimizer, "__init__", after=lambda this, *_: self.optimizers.add(this))
        wrap(optimizer, "zero_grad", before=lambda this: self._on_zero_grad(this))
        wrap(optimizer, "load_state_dict", around=self._load)
        wrap(torch.nn.Module, "zero_grad", before=lambda this: self._on_zero_grad(None, this))
        wrap(torch.autograd, "backward", around=self._backward)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            wrap(owner, "clip_grad_norm_", around=self._clip_norm)
        if hasattr(torch.nn.utils, "clip_grads_with_norm_"):
            wrap(torch.nn.utils, "clip_grads_with_norm_", around=self._clip_by_known_norm)
        scaler = torch.amp.GradScaler
        wrap(scaler, "step", around=self._scaler_step)
        wrap(scaler, "scale", before=self._on_scale)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "__init__" in vars(kind):
                wrap(kind, "__init__", after=lambda this, *_: self.schedulers.add(this))
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
                wrap(kind, "step", before=lambda this: self._notice_unseen_steps())
        atexit.register(self._finish)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._steps and not _is_nested():
            self._steps.clear()  # left by a step that raised an error
        watched = self.optimizers.find(optimizer)
        watched.read_lr()
        self._steps.append(watched)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watched = self.optimizers.find(optimizer)
        while self._steps and self._steps.pop() is not watched:
            pass
        if watched in self._steps:
            return  # its step called that of its base class
        for outer in self._steps:
            outer.is_wrapper = True
        if not watched.is_wrapper:  # otherwise the optimizer inside it has taken the step
            self._record_hooked(watched)

    def _record_hooked(self, watched: Watched) -> None:
        # Set by a gradient scaler whose optimizer checks for overflows itself.
        found_inf = getattr(watched.optimizer, "found_inf", None)
        self._record(watched, {} if found_inf is None else {"i": readable(found_inf)})

    def _record(self, watched: Watched, more: dict[str, Any]) -> None:
        watched.record({**self._clip, "d": self._divisor, **more})
        self._num_steps += 1
        self._since_step, self._clip, self._divisor = 0, {}, None

    def _notice_unseen_steps(self) -> None:
        """Records steps without hooks, as compiled ones are, by the version counter of a weight."""
        if torch.compiler.is_compiling() or not self._since_step or self._steps:
            return
        for watched in self.optimizers.without_hooks():
            if watched.num_backward and watched.has_new_weights():
                watched.read_lr()
                self._record(watched, {"x": "unseen"})

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Checkpointed activations make a backward pass of their own, perhaps in another thread.
        if torch.compiler.is_compiling() or self._in_backward:
            return backward(tensors, *args, **kwargs)
        self._notice_unseen_steps()
        if self._num_backward < _NUM_LOSSES_EXAMINED:
            self._divisor = loss_divisor(tensors, self._has_scaler)
        self._in_backward = True
        try:
            result = backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        self._num_backward += 1
        self._since_step += 1
        self.optimizers.count_backward()
        return result

    def _on_zero_grad(self, optimizer: Any, module: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        self._notice_unseen_steps()
        watched = None if optimizer is None else self.optimizers.find(optimizer)
        if self._since_step and not self._steps:
            groups = [module.parameters()] if watched is None else [group["params"] for group in optimizer.param_groups]
            if any(parameter.grad is not None for group in groups for parameter in group):
                which = None if watched is None else watched.number
                self.file.write({"discarded": which, "b": self._since_step})
                self._since_step = 0
                if watched is None:
                    self.optimizers.reset_backward()
        if watched is not None and not self._steps:  # closures, too, delete gradients
            watched.num_backward = 0

    def _clip_norm(self, clip: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        norm = clip(parameters, max_norm, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self._clip = {"n": readable(norm), "c": readable(max_norm), "k": self._clip.get("k", 0) + 1}
        return norm

    def _clip_by_known_norm(self, clip: Any, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kw: Any) -> None:
        if not torch.compiler.is_compiling():
            self._clip = {"n": readable(total_norm), "c": readable(max_norm), "k": self._clip.get("k", 0) + 1}
        clip(parameters, max_norm, total_norm, *args, **kw)

    def _on_scale(self, *_: Any) -> None:
        self._has_scaler = True

    def _scaler_step(self, step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._num_steps
        result = step(scaler, optimizer, *args, **kwargs)
        if self._num_steps == before and (bare := bare_optimizer(optimizer)) is not None:
            watched = self.optimizers.find(bare)
            self.file.write({"skipped": watched.number, "b": watched.num_backward})
            watched.num_backward = self._since_step = 0
            self._clip = {}
        return result

    def _load(self, load: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watched = self.optimizers.find(optimizer)
        before = watched.read_peaks()
        result = load(optimizer, *args, **kwargs)
        after = watched.read_peaks()
        if not any(isinstance(value, torch.Tensor) for value in (*before, *after)):
            self.file.write({"loaded": watched.number, "before": before, "after": after})
        return result

    # --- end ----------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if not (self.file.is_used or self._num_backward) and multiprocessing.parent_process() is not None:
            return  # a worker that loads data
        self._notice_unseen_steps()
        self.file.flush()
        engines = [name for name in ("deepspeed",) if name in sys.modules]
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        end: dict[str, Any] = {"backward": self._num_backward, "unused": self._since_step, "engines": engines}
        self.file.write({"end": {**end, "error": None if error is None else type(error).__name__}})


def _is_nested() -> bool:
    """Whether the optimizer step that has called a hook runs inside another one."""
    frame: FrameType | None = sys._getframe(2)  # torch's function around steps
    code, count = sys._getframe(2).f_code, 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count > 1


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    around: Callable[..., Any] | None = None,
) -> None:
    """Replaces a function by one that also calls `before(self)`, `after(self)` or `around(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if around is not None:
            return around(original, *args, **kwargs)
        if before is not None:
            before(args[0])
        result = original(*args, **kwargs)
        if after is not None:
            after(args[0])
        return result

    setattr(owner, name, call)
