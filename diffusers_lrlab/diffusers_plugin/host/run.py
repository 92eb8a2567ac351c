"""A third-party script while it runs: its arguments, what it prepares, and the events that hooks wait for.

Its own argparse takes all schedules as choices of its option for one, and explains mistakes.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...audit.recorder.steps import RealSteps
from ...core.errors import LabError
from ...schedules.registries import SCHEDULERS
from ...schedules.schedule import resolve_schedule
from .patches import Patches
from .source import HostScript, NotRecognised

LR_OPTIONS = {"--lr_scheduler", "--lr-scheduler", "--lr_scheduler_type"}


class HostRun:
    """The run of the script in this process, and the events that hooks wait for."""

    def __init__(self, strict: bool = False, patches: Patches | None = None):
        self.strict = strict  # a hook that recognises nothing to act on is an error
        self.patches = Patches() if patches is None else patches  # made by hooks
        self.arguments: dict[str, Any] = {}  # of the script, parsed
        self.unknown_arguments: list[str] = []  # that its parser does not know
        self.accelerator: Any = None  # of the script, once it prepares something
        self.models: list[torch.nn.Module] = []  # trained and prepared ones, without accelerate's wrappers
        self.optimizer: Optimizer | None = None  # the first prepared one, without wrapper; its steps are the updates
        self.training_loader: Any = None  # from the `prepare` call that also got an optimizer
        self.steps = RealSteps(_is_left_out)
        self.num_skipped = 0  # updates that a gradient scaler skipped
        self.error: LabError | None = None  # that has ended the run, even if the program has caught it
        self.is_complete = False  # whether the script has ended by itself
        self.on_parsed: list[Callable[[argparse.Namespace], None]] = []  # may change the script's arguments
        self.on_prepared: list[Callable[[], None]] = []  # after each `accelerator.prepare`
        self.on_update: list[Callable[[], None]] = []  # after each step of `optimizer`
        self.on_end: list[Callable[[], None]] = []  # at the end of the training, in all processes
        self._is_ended = False

    def install(self) -> None:
        """Wraps the functions that parse arguments, prepare models, step the optimizer and end the training."""
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer

        def parse_and_remember(parse: Any, /, *args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(*args, **kwargs)
            # A copy, since scripts write their computed length into the namespace.
            self.arguments, self.unknown_arguments = dict(vars(namespace)), rest
            for call in self.on_parsed:
                call(namespace)
            return namespace, rest

        def prepare_and_remember(prepare: Any, accelerator: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.accelerator = accelerator
            prepared = prepare(accelerator, *args, **kwargs)
            self._remember(args, prepared if len(args) > 1 else [prepared])
            for call in self.on_prepared:
                call()
            return prepared

        def step_and_count(step: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
            updates = self.num_updates
            step(optimizer, *args, **kwargs)
            if optimizer.optimizer is self.optimizer and optimizer.gradient_state.sync_gradients:
                self.num_skipped += self.num_updates == updates

        def notify_and_end(end_training: Any, accelerator: Any, /) -> None:
            self.end()
            end_training(accelerator)

        self.patches.callback(register_optimizer_step_pre_hook(self.steps.begin).remove)
        self.patches.callback(register_optimizer_step_post_hook(self.steps.end).remove)
        self.steps.after.append(self._notify_of_update)
        self.patches.wrap(argparse.ArgumentParser, "parse_known_args", parse_and_remember)
        self.patches.wrap(Accelerator, "prepare", prepare_and_remember)
        self.patches.wrap(Accelerator, "end_training", notify_and_end)
        self.patches.wrap(AcceleratedOptimizer, "step", step_and_count)

    def follow_arguments(self, script: HostScript, launcher_options: Iterable[str]) -> None:
        """
        Adds our schedules to the choices of options for schedules, and explains misplaced options of the launcher.

        A script that gives its `--lr_scheduler` to diffusers would report a wrong name only once its models are loaded.
        """
        ours = {*launcher_options} - {"--local_rank", "--local-rank"}  # which is passed on to the script

        def add_wider_argument(add_argument: Any, container: Any, /, *flags: Any, **options: Any) -> Any:
            if LR_OPTIONS & {*flags}:
                options = _widened(options, script)
            return add_argument(container, *flags, **options)

        def explain_order(error: Any, parser: argparse.ArgumentParser, message: str, /) -> Any:
            misplaced = [flag for word in self.unknown_arguments if (flag := word.partition("=")[0]) in ours]
            hint = f". Hint: options of the launcher ({', '.join(misplaced)}) go before the script's name."
            return error(parser, message + hint if misplaced else message)

        self.patches.wrap(argparse._ActionsContainer, "add_argument", add_wider_argument)
        self.patches.wrap(argparse.ArgumentParser, "error", explain_order)

    def _remember(self, given: Any, prepared: Any) -> None:
        new = [model for model in given if isinstance(model, torch.nn.Module) and model not in self.models]
        self.models += [model for model in new if any(each.requires_grad for each in model.parameters())]
        optimizers = [part for part in given if isinstance(part, Optimizer)]
        if not optimizers:
            return
        if self.optimizer is None:
            self.optimizer = optimizers[0]
        # Scripts that generate class images first prepare a loader for them, without an optimizer.
        loaders = {id(loader) for loader in self.accelerator._dataloaders}
        self.training_loader = next((part for part in prepared if id(part) in loaders), self.training_loader)

    def complete(self) -> None:
        """After the script's last line."""
        self.end()
        self.is_complete = self.error is None

    def end(self) -> None:
        """Ends the training: at `end_training` or, in a script that does not call it, after its last line."""
        can_gather = self.accelerator is None or self.accelerator.num_processes == 1 or torch.distributed.is_initialized()
        if self._is_ended or not can_gather:
            return
        self._is_ended = True
        for call in self.on_end:
            call()

    @property
    def num_updates(self) -> int:
        """Updates in this process, without those before a resume."""
        return 0 if self.optimizer is None else self.steps.count(self.optimizer)

    def _notify_of_update(self, optimizer: Optimizer) -> None:
        for call in self.on_update if optimizer is self.optimizer else ():
            call()

    @contextlib.contextmanager
    def error_kept(self) -> Iterator[None]:
        """Keeps an error, which a program may catch, and raises it again."""
        if self.error is not None:
            raise self.error
        try:
            yield
        except LabError as error:
            self.error = error
            raise

    # --- length of the run, and schedule steps in an update -----------------------------------------------------------

    def count_updates(self) -> int | None:
        """The optimizer updates of the whole run, from the script's arguments and its prepared data."""
        arguments = self.arguments
        epochs = arguments.get("max_train_epochs")  # of sd-scripts, in place of its steps
        length = int(arguments.get("max_train_steps") or arguments.get("max_steps") or 0)  # the second is transformers'
        if length > 0 and not epochs:
            return length
        epochs = epochs or arguments.get("num_train_epochs") or arguments.get("num_epochs")
        # A loader that was prepared without an optimizer is known when the script iterates over it.
        loader = self.training_loader
        if loader is None and self.accelerator is not None:
            loader = self.accelerator.gradient_state.active_dataloader
        if not epochs or not hasattr(loader, "__len__"):
            return None
        accumulation = self.accelerator.gradient_accumulation_steps
        if "max_steps" in arguments:  # transformers' Trainer accumulates by itself
            accumulation = arguments.get("gradient_accumulation_steps") or accumulation
        return math.ceil(float(epochs) * math.ceil(len(loader) / accumulation))

    def steps_per_update(self, wrapper: Any) -> int:
        """How often accelerate steps a schedule per update, given its wrapper of the schedule."""
        if not wrapper.step_with_optimizer:
            return int(self.accelerator.gradient_accumulation_steps)
        return 1 if wrapper.split_batches else int(self.accelerator.num_processes)

    def steps_by_script(self, num_steps: int) -> int:
        """
        How often the script steps a schedule per update, judging by its `num_steps` steps before the first update: if all
        micro-batches but the last have stepped the schedule, every micro-batch does.
        """
        accumulated = int(getattr(self.accelerator, "gradient_accumulation_steps", 1))
        if accumulated <= 1:  # a script may accumulate by itself
            accumulated = int(self.arguments.get("gradient_accumulation_steps") or 1)
        if hasattr(self.training_loader, "__len__"):
            accumulated = min(accumulated, len(self.training_loader))  # the end of an epoch ends an update
        return accumulated if 0 < accumulated - 1 <= num_steps else 1

    # --- output -------------------------------------------------------------------------------------------------------

    @property
    def lab_folder(self) -> Path:
        """The folder of our results in the script's `--output_dir`, which it must have."""
        return Path(self.arguments["output_dir"]) / "lrlab"

    def refuse(self, option: str, reason: NotRecognised) -> None:
        """Warns that an option has no effect on this script; an error with `--strict`."""
        text = f"{option} cannot be used in this script: {reason}."
        if self.strict:
            raise LabError(f"{text} (--strict)")
        self.warn(f"{text[0].upper()}{text[1:]} It is not used.")

    def unless_refused(self, hook: Any, call: Callable[..., None]) -> Callable[..., None]:
        """A part of a hook, called as long as the hook acts: once it raises [`NotRecognised`], `hook.option` is refused."""

        def call_if_active(*args: Any) -> None:
            try:
                if hook.is_active:
                    call(*args)
            except NotRecognised as reason:
                hook.is_active = False
                self.refuse(hook.option, reason)

        return call_if_active

    def warn(self, text: str) -> None:
        """Prints a warning, once for all processes."""
        from accelerate.state import PartialState

        if PartialState().is_main_process:
            sys.stderr.write(f"diffusers_lrlab: {text}\n")


def _is_left_out(optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has told an optimizer that takes its flag, such as a fused one, to leave out the step."""
    return bool(getattr(optimizer, "found_inf", False))


# --- schedules of the script's own option -------------------------------------------------------------------------------


class _WiderChoices(list[Any]):
    """A script's choices of schedules, and all other names and spec strings."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or _fault(str(getattr(value, "value", value))) is None


def _fault(spec: str) -> LabError | None:
    try:
        resolve_schedule(spec)
    except LabError as error:
        return error
    return None


def _widened(options: dict[str, Any], script: HostScript) -> dict[str, Any]:
    """What the script gives `add_argument`, changed so that the option takes our names and explains wrong ones."""
    choices = options.get("choices")
    own = [options.get("default"), *(script.texts if choices is None else choices)]  # a default may be a list
    if choices is not None:
        names = {str(getattr(choice, "value", choice)) for choice in choices}
        options = {**options, "choices": _WiderChoices([*choices, *(name for name in SCHEDULERS if name not in names)])}
    takes_text = options.get("type", str) is str and options.get("action", "store") == "store"
    if takes_text and (choices is not None or script.has_schedules_of_diffusers):
        options["type"] = _schedule(own)
    return options


def _schedule(own: Collection[Any]) -> Callable[[str], str]:
    """A type for argparse: a name or a spec string that `get_scheduler` takes, or one of the script's `own`."""

    def schedule(text: str) -> str:
        if text not in own and (fault := _fault(text)):
            raise argparse.ArgumentTypeError(str(fault))
        return text

    return schedule
