"""Checks whether a run may write into a folder, and finds the checkpoint to resume from."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import LabError, is_first_process, must_be, warn
from ..core.files import TEMPORARY
from ..core.lock import LOCK_FILES, locked
from ..core.manifest import find_damage
from ..core.options import names_where
from .config import ResolvedConfig, TrainingConfig, complete_options
from .run_files import check_kinds_of_own, check_names_of_checkpoints, is_checkpoint
from .run_folder import FINDER_FILES, RunFolder

# Starts a new run, for a command with --resume_from_checkpoint.
ANEW = "--overwrite_output_dir in place of --resume_from_checkpoint, or another --output_dir without it"


class OtherSettings(LabError):
    """A checkpoint belongs to a run with other settings, `names`."""

    def __init__(self, message: str, names: list[str]):
        super().__init__(message)
        self.names = names


@contextmanager
def locked_folder(config: ResolvedConfig) -> Iterator[None]:
    """Locks the folder of a run inside this block, in the first process."""
    if config.dry_run or not is_first_process():
        yield
        return
    check_writable(Path(config.output_dir))
    with locked(Path(config.output_dir), "--output_dir"):
        RunFolder(Path(config.output_dir)).remove_leftovers()
        yield


def check_writable(path: Path) -> None:
    """Raises a `LabError` if the folder of a run cannot be made or written to."""
    if path.is_file():
        raise LabError(f"--output_dir {str(path)!r} is a file. Give the name of a folder.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise LabError(
            f"--output_dir {str(path)!r} cannot be written: {str(existing)!r} is not a folder that you can write to."
        )


def find_checkpoint(config: ResolvedConfig) -> Path | None:
    """The checkpoint to resume from, `None` for a new run. Raises a `LabError` if the folder allows neither."""
    folder = RunFolder(Path(config.output_dir))
    check_kinds_of_own(folder.path, config.logging_dir)
    found = _find_checkpoint(folder, config)
    check_names_of_checkpoints(folder.path)
    return found


def _find_checkpoint(folder: RunFolder, config: ResolvedConfig) -> Path | None:
    if config.resume_from_checkpoint is None:
        _check_start(folder, config)
        return None
    if config.resume_from_checkpoint == "latest":
        newest = folder.newest_checkpoint()
        if newest is None:
            _check_nothing_is_lost(folder)
        return newest
    asked = Path(config.resume_from_checkpoint)
    path = asked if asked.is_dir() else folder.path / asked.name
    if not is_checkpoint(path):
        remedy = _another_checkpoint(folder, config)
        raise LabError(f"{config.resume_from_checkpoint!r} is not a checkpoint of this script. {remedy}")
    if path.resolve().parent != folder.path.resolve():
        raise LabError(
            f"The checkpoint {str(path)!r} belongs to the run in {str(path.parent)!r}, not to --output_dir "
            f"{str(folder.path)!r}. Give --output_dir {path.parent}."
        )
    if damage := find_damage(path):
        raise LabError(f"{path.name!r} cannot be resumed from: {damage}. {_another_checkpoint(folder, config)}")
    return path


def _another_checkpoint(folder: RunFolder, config: ResolvedConfig) -> str:
    """The remedy for a checkpoint that cannot be resumed from."""
    known = [path.name for path in folder.checkpoints() if _can_be_resumed(path, config)]
    if known:
        return f"Give another one of {str(folder.path)!r} ({', '.join(known)}), or 'latest' for the newest intact one."
    if folder.holds_run():
        return f"Start a new run: {ANEW}."
    if _is_free(folder):
        return f"There is none in {str(folder.path)!r}: leave --resume_from_checkpoint out."
    return f"There is none in {str(folder.path)!r}: give another --output_dir, without --resume_from_checkpoint."


def _can_be_resumed(checkpoint: Path, config: ResolvedConfig) -> bool:
    """Whether a checkpoint is intact, and belongs to a run with these settings."""
    if find_damage(checkpoint) is not None:
        return False
    try:
        resumed_config(config, checkpoint)
    except LabError:
        return False
    return True


def choose_start(config: ResolvedConfig) -> tuple[ResolvedConfig, Path | None]:
    """
    The final configuration, and the checkpoint to resume from, `None` for a new run. Makes all checks of the folder that
    need no data, and raises a `LabError` if it allows neither.
    """
    checkpoint = find_checkpoint(config)
    if checkpoint is not None:
        return resumed_config(config, checkpoint), checkpoint
    if not config.dry_run:
        _check_start_stays(config)
    return config, None


def _check_start_stays(config: ResolvedConfig) -> None:
    """Raises a `LabError` for start weights in the folder of the run, which is cleared before they are loaded."""
    name = config.pretrained_model_name_or_path
    path = None if name is None else Path(name).expanduser()
    if path is not None and path.exists() and path.resolve().is_relative_to(Path(config.output_dir).resolve()):
        wanted = f"outside of --output_dir {config.output_dir!r}, whose run would be removed before it is read"
        raise must_be("--pretrained_model_name_or_path", name, wanted, "give another --output_dir")


def check_agreed(checkpoint: Path | None, config: ResolvedConfig) -> None:
    """Raises a `LabError` if processes, perhaps on several machines, would resume from different checkpoints."""
    from accelerate.utils import gather_object

    seen = dict.fromkeys(gather_object([checkpoint.name if checkpoint else "no checkpoint"]))
    if len(seen) > 1:
        raise LabError(
            f"The processes see different things in --output_dir {config.output_dir!r}: {', '.join(seen)}. Give a folder "
            "that all machines share, or copy the checkpoints of the first machine to the others."
        )


def _check_nothing_is_lost(folder: RunFolder) -> None:
    """Allows a run without any checkpoint to start again; raises a `LabError` if that would replace a result."""
    if (folder.path / "model_index.json").exists():
        raise LabError(
            f"There is no checkpoint to resume from in {str(folder.path)!r}, only a trained pipeline. Start a new run: "
            f"{ANEW}."
        )
    check_fresh(folder, overwrite=True)
    warn(f"there is no checkpoint to resume from in {str(folder.path)!r}: the run starts at update 0.")


def _check_start(folder: RunFolder, config: ResolvedConfig) -> None:
    """Raises a `LabError` if a new run cannot use a folder; a dry run, which writes nothing, only warns."""
    check_writable(folder.path)
    try:
        check_fresh(folder, config.overwrite_output_dir, config)
    except LabError as error:
        if not config.dry_run:
            raise
        warn(f"training there would be refused: {error}")


def check_fresh(folder: RunFolder, overwrite: bool, config: ResolvedConfig | None = None) -> None:
    """Raises a `LabError` if a new run, with this configuration, cannot use a folder or would replace another run."""
    path = folder.path
    check_writable(path)
    if _is_free(folder):
        return
    if not folder.holds_run():
        raise LabError(
            f"--output_dir {str(path)!r} holds other files and no run. Give a new or empty folder; other files are never "
            "overwritten."
        )
    status = folder.read_record().get("run", {}).get("status", "unknown")
    if not overwrite:
        raise LabError(
            f"--output_dir {str(path)!r} already holds a run (status: {status}). {_what_to_do(folder, status, config)}"
        )


def _what_to_do(folder: RunFolder, status: str, config: ResolvedConfig | None) -> str:
    """The remedy for a folder that holds a run; names a resume only if one is possible."""
    instead = "eplace it with --overwrite_output_dir, or choose another folder"
    try:
        newest = folder.newest_checkpoint()
    except LabError:  # all are damaged
        return f"R{instead}."
    if status == "finished" or (newest is None and (folder.path / "model_index.json").exists()):
        return f"R{instead}."
    if newest is not None and config is not None:
        try:
            resumed_config(config, newest)
        except OtherSettings as error:
            return (
                f"The run in it has other settings ({', '.join(error.names)}). R{instead}; to resume it, give its settings "
                "and --resume_from_checkpoint latest."
            )
    return f"Continue it with --resume_from_checkpoint latest, r{instead}."


def _is_free(folder: RunFolder) -> bool:
    """Whether a folder holds nothing but results of the finder and unfinished files of killed runs."""
    return all(_is_no_result(entry, folder) for entry in folder.path.rglob("*") if not entry.is_dir())


def _is_no_result(file: Path, folder: RunFolder) -> bool:
    if file.name in LOCK_FILES or any(part.startswith(TEMPORARY) for part in file.relative_to(folder.path).parts):
        return True
    return file.parent == folder.lab and file.name in FINDER_FILES


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`trainer.json` of a checkpoint."""
    try:
        return json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise LabError(f"{str(checkpoint / 'trainer.json')!r} is damaged ({error}). Resume from another one.") from None


def resumed_config(config: ResolvedConfig, checkpoint: Path) -> ResolvedConfig:
    """
    The configuration of a resumed run, with the learning rate that the finder found at its start. Raises [`OtherSettings`],
    before data are read, for another configuration.
    """
    state = read_state(checkpoint)
    if config.mixed_precision is None and state.get("mixed_precision") == "no":
        # A run in float32, such as one on a CPU, stays in float32 where bf16 is the default.
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        config = dataclasses.replace(config, mixed_precision="no" if launched == "no" else None)
    if config.auto_learning_rate:
        learning_rate = state["config"]["learning_rate"]
        config = dataclasses.replace(config, learning_rate=learning_rate, auto_learning_rate=False)
    # An option that is missing in a checkpoint had its default.
    saved = complete_options(state["config"])
    # Options that may change are compared in other ways where it matters: the global batch, the configuration of the model.
    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    current = {f"--{name}": value for name, value in config.to_dict().items() if name in fixed}
    check_same_run({f"--{name}": value for name, value in saved.items()}, current, checkpoint)
    return config


def check_same_run(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Raises [`OtherSettings`] with the differences between the current run and the one that wrote the checkpoint."""
    now = json.loads(json.dumps(now))
    names = [name for name, value in now.items() if saved.get(name) != value]
    names = [name for name in names if name.removesuffix("_kwargs") not in names or not name.endswith("_kwargs")]
    differing = [f"{name}: {saved.get(name)!r} then, {now[name]!r} now" for name in names]
    if differing:
        lines = "\n  ".join(differing)
        remedy = _remedy_for(names, RunFolder(checkpoint.parent))
        raise OtherSettings(f"{str(checkpoint)!r} was written with other settings:\n  {lines}\n{remedy}", names)


def _remedy_for(names: list[str], folder: RunFolder) -> str:
    """The remedies for a run whose settings `names` differ from those of the run in the folder."""
    reason, resume = "", "Resume with the arguments of that run, or start"
    if folder.is_finished():
        reason, resume = "That run has finished. ", "Start"
    if names == ["data"]:
        reason, resume = "The data have changed. ", "Restore them, or start"
    if not {"--max_train_steps", "--num_epochs"}.isdisjoint(names):
        reason += "The learning rates of a run depend on its length, so a run of another length is a different run. "
    return f"{reason}{resume} a new one: {ANEW}."
