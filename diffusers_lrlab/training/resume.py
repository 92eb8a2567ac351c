"""Where a run starts: in a folder that it may write into, or from a checkpoint there."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import LabError, is_first_process, must_be, warn
from ..core.files import locked
from ..core.manifest import find_damage
from ..core.options import names_where
from .config import ResolvedConfig, TrainingConfig, complete_options
from .record_schema import read_json
from .run_folder import FINDER_FILES, RunFolder, is_checkpoint, is_leftover


@contextmanager
def locked_folder(config: ResolvedConfig) -> Iterator[None]:
    """Locks the folder of a run inside this block, in the first process."""
    if config.dry_run or not is_first_process():
        yield
        return
    with locked(Path(config.output_dir), "--output_dir"):
        RunFolder(Path(config.output_dir)).remove_leftovers()
        yield


def find_checkpoint(config: ResolvedConfig) -> Path | None:
    """The checkpoint to resume from, `None` for a new run. Raises a `LabError` if the folder allows neither."""
    folder, asked = RunFolder(Path(config.output_dir)), config.resume_from_checkpoint
    if asked is None:
        try:
            check_fresh(folder, config.overwrite_output_dir)
        except LabError as error:
            if not config.dry_run:  # which writes nothing
                raise
            warn(f"training there would be refused: {error}")
        return None
    if asked == "latest":
        newest = folder.newest_checkpoint()
        if newest is None:
            check_fresh(folder, replaces=not (folder.path / "model_index.json").exists())
            warn(f"there is no checkpoint to resume from in {str(folder.path)!r}: the run starts at update 0.")
        return newest
    path = Path(asked) if Path(asked).is_dir() else folder.path / Path(asked).name
    if not is_checkpoint(path):
        problem = "no checkpoint"
    elif path.resolve().parent != folder.path.resolve():
        problem = f"one of the run in {str(path.parent)!r}"
    elif damage := find_damage(path):
        problem = f"a damaged one: {damage}"
    else:
        return path
    hint = "give latest for its newest intact one, or leave --resume_from_checkpoint out and give a new --output_dir"
    raise must_be("--resume_from_checkpoint", asked, f"a checkpoint in --output_dir {str(folder.path)!r}", hint, got=problem)


def choose_start(config: ResolvedConfig) -> tuple[ResolvedConfig, Path | None]:
    """
    The final configuration, and the checkpoint to resume from, `None` for a new run. Makes all checks of the folder that
    need no data, and raises a `LabError` if it allows neither.
    """
    if (checkpoint := find_checkpoint(config)) is not None:
        return resumed_config(config, checkpoint), checkpoint
    name = config.pretrained_model_name_or_path
    path = None if name is None or config.dry_run else Path(name).expanduser()
    if path is not None and path.exists() and path.resolve().is_relative_to(Path(config.output_dir).resolve()):
        wanted = f"outside of --output_dir {config.output_dir!r}, whose run would be removed before it is read"
        raise must_be("--pretrained_model_name_or_path", name, wanted, "give another --output_dir")
    return config, None


def check_agreed(checkpoint: Path | None, config: ResolvedConfig) -> None:
    """Raises a `LabError` if processes, perhaps on several machines, would resume from different checkpoints."""
    from accelerate.utils import gather_object

    seen = dict.fromkeys(gather_object([checkpoint.name if checkpoint else "no checkpoint"]))
    if len(seen) > 1:
        raise LabError(
            f"The processes see different things in --output_dir {config.output_dir!r}: {', '.join(seen)}. Give a folder "
            "that all machines share, or copy the checkpoints of the first machine to the others."
        )


def check_fresh(folder: RunFolder, replaces: bool) -> None:
    """Raises a `LabError` for a folder with other files, or with a run unless the new one `replaces` it."""
    path = folder.path
    there = [path] if path.is_file() else path.rglob("*")
    of_finder = [folder.lab / name for name in FINDER_FILES]  # stay for the run
    if all(entry.is_dir() or entry in of_finder or is_leftover(entry, path) for entry in there):
        return
    if not folder.holds_run():
        got, hint = "one with other files and no run", "give a new folder; other files are never overwritten"
    else:
        status = folder.read_record().get("run", {}).get("status", "unknown")  # by the record a run is removed
        if replaces:
            return
        got = f"one that holds a run (status: {status})"
        hint = "give a new folder, or replace the run with --overwrite_output_dir (without --resume_from_checkpoint)"
        if not (path / "model_index.json").exists():
            hint += "; the command that started it continues it with --resume_from_checkpoint latest"
    raise must_be("--output_dir", str(path), "a new or empty folder", hint, got=got)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`trainer.json` of a checkpoint."""
    return read_json(checkpoint / "trainer.json", "resume from another checkpoint", parse_constant=float)


def resumed_config(config: ResolvedConfig, checkpoint: Path) -> ResolvedConfig:
    """
    The configuration of a resumed run, with the learning rate that the finder found at its start. Raises a `LabError`,
    before data are read, for another configuration.
    """
    state = read_state(checkpoint)
    if config.mixed_precision is None and state.get("mixed_precision") == "no":
        # A run in float32, such as one on a CPU, stays in float32 where bf16 is the default.
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        config = dataclasses.replace(config, mixed_precision="no" if launched == "no" else None)
    if config.finds_learning_rate:
        learning_rate = state["config"]["learning_rate"]
        config = dataclasses.replace(config, learning_rate=learning_rate, finds_learning_rate=False)
    # An option that is missing in a checkpoint had its default.
    saved = complete_options(state["config"])
    # Options that may change are compared in other ways where it matters: the global batch, the configuration of the model.
    fixed = names_where(TrainingConfig, may_change_on_resume=False)
    current = {f"--{name}": value for name, value in config.to_dict().items() if name in fixed}
    check_same_run({f"--{name}": value for name, value in saved.items()}, current, checkpoint)
    return config


def check_same_run(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Raises a `LabError` with the differences between the current run and the one that wrote the checkpoint."""
    now = json.loads(json.dumps(now))
    names = [name for name, value in now.items() if saved.get(name) != value]
    names = [name for name in names if name.removesuffix("_kwargs") not in names or not name.endswith("_kwargs")]
    if names:
        lines = "\n  ".join(f"{name}: {saved.get(name)!r} then, {now[name]!r} now" for name in names)
        remedy = (
            "Resume with the settings and data of that run, or start a new one: give --overwrite_output_dir in place of "
            "--resume_from_checkpoint, or another --output_dir without it."
        )
        if not {"--max_train_steps", "--num_epochs"}.isdisjoint(names):
            remedy += " The learning rates of a run depend on its length; `lrlab extend` continues one to another length."
        raise LabError(f"{str(checkpoint)!r} was written with other settings:\n  {lines}\n{remedy}")
