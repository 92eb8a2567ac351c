"""An exponential moving average of the weights that a third-party script trains, saved in the script's format."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...averaging.forms import EMAForm
from ...core.errors import LabError
from ...core.files import atomic_folder
from ...core.words import counted
from ..host.files import problem_with
from ..host.hook import Hook, Host
from ..host.script_averages import BY_NAMES, ScriptAverages, numbered
from ..host.trained_models import TrainedModels
from ..script.source import HostScript, NotRecognised, lines_of
from .clock import HostClock, clock_of

SWAPS = ("validation", "final", "both")
_END, _HOOK, _VALIDATION = "wait_for_everyone", "register_save_state_pre_hook", "log_validation"
_STATE = Path("lrlab", "ema.safetensors")  # in a checkpoint of the script
_NAMES_SHOWN = 3


class Saved(NamedTuple):
    """The average that was written last, and the updates in it."""

    path: Path
    num_updates: int


def recognise(script: HostScript) -> str:
    if not script.calls("prepare"):
        raise NotRecognised("it prepares nothing with accelerate, so its trained models are unknown")
    if script.calls("update_ema"):
        raise NotRecognised(f"it keeps an average itself ({lines_of(script.calls('update_ema'))})")
    if script.assigns("index_no_updates"):
        raise NotRecognised("it resets embeddings after each update, which an average would not see")
    if not script.calls(_END) and not script.calls("end_training"):
        raise NotRecognised(
            f"it calls neither accelerator.{_END} nor accelerator.end_training, so the end of its training is unknown"
        )
    if script.calls(_HOOK):
        found = f"its hook for checkpoints saves the trained weights ({lines_of(script.calls(_HOOK))})"
    elif script.calls("save_pretrained") and not script.calls("save_attn_procs"):
        found = "save_pretrained saves the models that it trains"
    else:
        raise NotRecognised(f"how it saves its weights is unknown: it has no {_HOOK} and calls no save_pretrained")
    own = ", without --use_ema" if script.mentions("use_ema") else ""
    return f"{found}{own}; --ema_swap {'both' if _has_validation_function(script) else 'final'}"


def _has_validation_function(script: HostScript) -> bool:
    names = [getattr(node, "name", "") for node in script.tree.body]
    return _VALIDATION in names and bool(script.calls(_VALIDATION))


def make(host: Host) -> Hook:
    return EMAHook(host.script, clock_of(host), host.options.ema, host.options.ema_swap)


class EMAHook:
    """
    Averages all trainable parameters after each update, in float32, and writes the average to `lrlab/ema` in the script's
    output folder at the end, and in each of its checkpoints, with the state for a resume beside it. The first of several
    averages is saved there; the others are in `lrlab/ema_2` and so on. `lrlab/ema_snapshots` has snapshots of post-hoc
    averages, from which `lrlab ema` makes others.

    `swap` says where the average replaces the weights: in "validation", in the "final" result of the script, or in "both".
    """

    def __init__(self, script: HostScript, clock: HostClock, spec: str, swap: str | None = None):
        self.averages, self.script, self.clock, self.run = ScriptAverages(spec), script, clock, clock.run
        recognise(script)
        self.swaps: tuple[str | None, ...] = SWAPS[:2] if swap == "both" else (swap,)
        self.is_active, self.is_saved, self.is_swapped = True, False, False
        self.trained: Any = None  # the models, once they are prepared
        self.num_seen = 0  # updates in the average, including those before a resume
        self.saved: Saved | None = None
        self.not_finite: list[str] = []  # names of tensors in the written average
        self._validates = self._has_warned = False
        self._registered: Any = None  # the accelerator with our hooks

    @property
    def form(self) -> EMAForm:
        """The form of the first average."""
        return self.averages.forms[0]

    @property
    def average(self) -> Any:
        """The first average; `None` before there is one, and after a resume without it."""
        return self.averages.emas[0] if self.averages.emas else None

    def install(self) -> None:
        from accelerate import Accelerator

        def wait_and_finish(wait: Any, accelerator: Any, /) -> None:
            wait(accelerator)
            if self.script.caller(self.script.calls(_END)) is not None and self._is_at_end():
                self._finish()

        self.run.patches.wrap(Accelerator, _END, wait_and_finish)
        self.run.on_prepared.append(self._begin)
        self.run.on_update.append(self._step)
        self.run.on_end.append(self._finish_late)

    # --- before training ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Finds the trained models once there is an optimizer, and refuses those that cannot be averaged."""
        if not self.is_active or self.run.optimizer is None or self.num_seen:
            return
        if self.run.arguments.get("use_ema"):
            raise LabError("The script keeps an EMA itself (--use_ema). Remove that or --ema.")
        try:
            self.trained = TrainedModels(self.run)
            if not self.script.calls(_HOOK):  # else it may register one later
                self.trained.check_format()
        except NotRecognised as reason:
            self._refuse(reason)
            return
        if self.averages.lacks_images and (images := self.run.images_per_update(f"--ema {self.form.name}")) is not None:
            self.averages.know_images(images)
        self._restart()
        accelerator = self.run.accelerator
        if self._registered is not accelerator:
            accelerator.register_save_state_pre_hook(self._save_state)
            accelerator.register_load_state_pre_hook(self._load_state)
            self._registered = accelerator
        if "validation" in self.swaps:
            self._swap_in_validation()
        if "final" in self.swaps and accelerator.scaler is not None:
            self.swaps = tuple(swap for swap in self.swaps if swap != "final")
            skips = "its gradient scaler skips updates, so the last one is not known in advance; bf16 needs no scaler"
            self.run.refuse("--ema_swap final", NotRecognised(skips))

    def _refuse(self, reason: NotRecognised) -> None:
        self.is_active, self.averages.emas = False, []
        self.run.refuse("--ema", reason)

    def _restart(self) -> None:
        """The averages are the weights as they are."""
        self.averages.restart(self.trained.parameters)

    def _swap_in_validation(self) -> None:
        variables = sys.modules["__main__"].__dict__
        validate = variables.get(_VALIDATION)
        if self._validates:
            return
        if not _has_validation_function(self.script) or not callable(validate):
            self.swaps = tuple(swap for swap in self.swaps if swap != "validation")
            reason = f"its validation is not a function {_VALIDATION}, so its start and end are unknown"
            self.run.refuse("--ema_swap validation", NotRecognised(reason))
            return

        @functools.wraps(validate)
        def validate_average(*args: Any, **kwargs: Any) -> Any:
            with self.weights():
                return cast(Callable[..., Any], validate)(*args, **kwargs)

        variables[_VALIDATION], self._validates = validate_average, True

    # --- while it trains ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.is_active:
            return
        if self.is_swapped:
            raise LabError(
                f"The script continues to train after {counted(self._num_updates(), 'update')}, after the average has "
                "replaced the weights (--ema_swap). Give its real number of updates: --num_updates N before its name."
            )
        if "final" in self.swaps and self.clock.count_updates() is None:
            raise LabError(
                "--ema_swap final needs the number of updates, which the script's arguments do not determine. Give "
                "--num_updates N before its name."
            )
        if not self.num_seen:
            try:
                self.trained.check_format()
            except NotRecognised as reason:
                self._refuse(reason)
                return
        if self.average is None:  # of a resume from a checkpoint without it
            self._restart()
        if self.averages.lacks_images:  # its data are prepared apart from the models
            self.averages.know_images(self.run.must_know_images(f"--ema {self.form.name}"))
        self.num_seen += 1
        if self.averages.updates is None:
            missed = self._num_updates() - self.num_seen  # before a resume without averages
            last = self.clock.count_updates()
            self.averages.plan_snapshots(None if last is None else last - missed)
            if self.run.accelerator.is_main_process:
                self.averages.rewind_snapshots(self.run.lab_folder, self.num_seen - 1)
        self.averages.advance(self.num_seen)
        if self.run.accelerator.is_main_process:
            named = self.run.lab_folder, self.num_seen, self.trained.names, Path(self.script.path).name
            self.averages.write_snapshot(*named)

    def _num_updates(self) -> int:
        """Updates so far, including those before a resume."""
        return self.clock.update if self.clock.counts else self.num_seen

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The parameters hold the average; afterwards they are back to the bit."""
        if self.average is None or self.is_swapped:
            yield
            return
        with self.average.swapped_in():
            yield

    @contextmanager
    def holding(self, values: list[Any]) -> Iterator[None]:
        """The parameters hold other values, one for each; afterwards they are back to the bit."""
        average = self.average
        own, average.shadow_params = average.shadow_params, values
        try:
            with average.swapped_in():
                yield
        finally:
            average.shadow_params = own

    # --- what is saved -----------------------------------------------------------------------------------------------

    def _save_models(self, folder: Path) -> None:
        """Saves the averages in the script's format, those beside the first one in folders beside it."""
        for index in self.averages.saved[1:]:
            with self.averages.emas[index].swapped_in():
                self._save_model(numbered(folder, index), index)
        with self.weights():
            missing = self._save_model(folder)
            self.not_finite = self.trained.not_finite()
        self.saved = Saved(folder / BY_NAMES if missing else folder, self.num_seen)

    def _save_model(self, folder: Path, index: int = 0) -> list[str]:
        """
        Saves the current weights, which are an average, in the script's format; if that lacks weights, also all of them by
        the names of parameters. Returns those names.
        """
        with atomic_folder(folder) as temporary:
            self.trained.save(temporary)
            if missing := self.trained.missing_from(temporary):
                weights = self.averages.emas[index].shadow_params
                self.trained.save_tensors(temporary / BY_NAMES, weights, self._metadata(index))
        if missing and not self._has_warned:
            self._has_warned = True
            names = ", ".join(missing[:_NAMES_SHOWN]) + ", ..." * (len(missing) > _NAMES_SHOWN)
            self.run.warn(
                f"the script's hook for checkpoints omits {len(missing)} of {len(self.trained.names)} trained tensors "
                f"({names}): the whole average is in {BY_NAMES} beside its files, by the names of parameters."
            )
        return missing

    def _metadata(self, index: int = 0) -> dict[str, str]:
        return {"num_updates": str(self.num_seen), "form": str(self.averages.forms[index])}

    def _save_state(self, models: Any, weights: Any, folder: str) -> None:
        """Adds the average to a checkpoint of the script, which may be saved by one process alone."""
        if self.average is None or not self.run.accelerator.is_main_process:
            return
        self.averages.finish_snapshots()  # a resume expects those before the checkpoint
        if self.is_swapped:
            self.run.warn(
                "the weights of this checkpoint are the average, since it was saved after the last update (--ema_swap)."
            )
        self._save_models(Path(folder) / "lrlab" / "ema")
        for index, average in enumerate(self.averages.emas):
            state = numbered(Path(folder) / _STATE, index)
            self.trained.save_tensors(state, average.shadow_params, self._metadata(index))

    def _load_state(self, models: Any, folder: str) -> None:
        """Loads the averages, before the script's weights."""
        if not self.is_active:
            return
        paths = [numbered(Path(folder) / _STATE, index) for index in range(len(self.averages.forms))]
        self.averages.updates = None
        if missing := [index for index, path in enumerate(paths) if not path.exists()]:
            of = "average (it was made without --ema)" if 0 in missing else f"average number {missing[0] + 1} of --ema"
            start = "the average starts" if len(paths) == 1 else "all averages start"
            self.num_seen, self.averages.emas = 0, []
            self.run.warn(f"the checkpoint has no {of}, so {start} from the weights.")
            return
        loaded = [self.trained.load_tensors(path) for path in paths]
        self._restart()
        for form, average, (saved, metadata) in zip(self.averages.forms, self.averages.emas, loaded, strict=True):
            if metadata["form"] != str(form):
                self.run.warn(f"the average was {metadata['form']} before, and continues as {form}.")
            average.shadow_params = saved
        self.num_seen = int(loaded[0][1]["num_updates"])

    # --- the end -----------------------------------------------------------------------------------------------------

    def _is_at_end(self) -> bool:
        last = self.clock.count_updates()
        return self.is_active and not self.is_saved and last is not None and self._num_updates() >= last

    @property
    def folder(self) -> Path:
        return self.run.lab_folder / "ema"

    def _finish(self) -> None:
        """After the last update, in all processes, before the script saves its result."""
        if self.average is None:
            return
        if "final" in self.swaps:
            self.average.copy_to(self.trained.parameters)
            self.is_swapped = True
        if self.run.accelerator.is_main_process:
            self.averages.finish_snapshots()
            self._save_models(self.folder)
            with contextlib.nullcontext() if self.is_swapped else self.average.swapped_in():
                self.averages.write_places(self.run.lab_folder, self.trained, self.folder)
        self.is_saved = True

    def _finish_late(self) -> None:
        """Finishes for a script that ended at another update than expected."""
        if self.is_active and not self.is_saved and self.num_seen:
            if "final" in self.swaps:
                self.run.warn(
                    f"the script ended after {counted(self._num_updates(), 'update')}, not the expected "
                    f"{self.clock.count_updates()}: it saved the weights, not their average (--ema_swap). Give its real "
                    "number of updates: --num_updates N before its name."
                )
                self.swaps = ()
            self._finish()

    def report(self) -> str:
        if not self.is_active:
            return ""
        if not self.num_seen:
            return f"--ema {self.form.name}: no update was seen, so nothing was averaged."
        if self.saved is None:
            return f"--ema {self.form.name}: the average was not written, since the script did not end."
        where = f"is in {self.saved.path}"
        if not self.is_saved:
            where += ", the last checkpoint, since the script did not end"
        if problem := problem_with(self.saved.path):
            where = f"was written but is lost: {problem}"
        text = f"--ema {self.form.name}: the average of {counted(self.saved.num_updates, 'update')} {where}"
        text += ", and in the script's final result." if self.is_swapped else "."
        if others := [numbered(self.folder, index).name for index in self.averages.saved[1:]]:
            text += f" Beside it: {', '.join(others)}."
        if self.averages.posthoc is not None and self.is_saved:
            text += f" Averages of other widths: lrlab ema {self.run.lab_folder.parent} --sigma_rel 0.075."
        if self.not_finite:
            tensors = f"{len(self.not_finite)} of its {counted(len(self.trained.names), 'tensor')}"
            text += f" It cannot be used: {tensors} hold values that are not finite, such as {self.not_finite[0]}."
        return text
