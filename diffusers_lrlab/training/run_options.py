"""Options of the length, speed and output of a run."""

import os
from dataclasses import dataclass
from typing import Literal

from ..core.options import DESTINATION, DRAWS, EVALUATION, OUTPUT, SPEED, THIS_START, UPDATE, WHOLE_RUN, Need, option
from ..data.options import NOT_STREAMING
from .learning_options import HELD_OUT

PUSH = Need("--push_to_hub", lambda config: config.push_to_hub)
LOGGER = Need("--logger with a tracker", lambda config: config.logger != "none")
LAUNCHER = Need("a launcher, such as accelerate launch", lambda config: "LOCAL_RANK" in os.environ)
NO_STEPS = Need("--max_train_steps", lambda config: config.max_train_steps is None, is_absence=True)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Parameters that control the length, speed and randomness of the run."""

    _argument_group_name = "length, speed and randomness"

    num_epochs: int | None = option(
        None,
        "Passes over the data (default: 100; 10,000 updates for points).",
        WHOLE_RUN,
        range="[1, 1e9]",
        needs=(NO_STEPS,),
    )
    max_train_steps: int | None = option(
        None,
        "Length of the run in optimizer updates, instead of --num_epochs.",
        WHOLE_RUN,
        range="[1, 1e9]",
        is_first=True,
    )
    train_batch_size: int | None = option(
        None,
        "Images per process and micro-batch (default: 16; 64 for embedded image sets, 256 points).",
        UPDATE,
        finder="uses",
        may_change_on_resume=True,
        range="[1, 1e7]",
        is_first=True,
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches per optimizer update.", UPDATE, finder="uses", may_change_on_resume=True, range="[1, 1e6]"
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None,
        "Precision of the forward pass (default: accelerate's setting, else bf16 on GPUs that support it).",
        UPDATE,
        may_change_on_resume=True,
    )
    seed: int = option(
        0,
        "Seed of the initial weights, data order, timesteps and noise.",
        DRAWS,
        finder="uses",
        study="no",
        range="[0, 9223372036854775807]",
    )
    plugins: str | None = option(
        None,
        "Comma-separated Python files or modules that register schedules, samplers, optimizers or metrics of your own.",
        SPEED,
        is_repeated=False,
        is_path=True,
        aliases=("--import",),
        spelling="--import",
    )
    local_rank: int = option(
        -1,
        "Set by launchers, not by hand.",
        SPEED,
        study="no",
        is_repeated=False,
        range="[-1, 1e6]",
        is_internal=True,
        needs=(LAUNCHER,),
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Parameters that control what is written, when, and where it goes."""

    _argument_group_name = "output"

    output_dir: str | None = option(
        None,
        "Folder of the run (default: OBJECTIVE-DATASET-RESOLUTION, one for each data set; upstream ddpm-model-64).",
        DESTINATION,
        finder="uses",
        is_first=True,
    )
    overwrite_output_dir: bool = option(
        False, "Replace the run in --output_dir and keep other files there. Ignored when a run is resumed.", THIS_START
    )
    logging_steps: int = option(10, "Updates between rows of lrlab/metrics.jsonl.", WHOLE_RUN, range="[1, 1e9]")
    validation_steps: int | None = option(
        None,
        "Updates between validations (default: 20 validations per run, fewer if they would take over a tenth of its time).",
        WHOLE_RUN,
        range="[1, 1e9]",
        needs=(HELD_OUT,),
    )
    save_images_epochs: int | None = option(
        None,
        "Epochs between sample images, besides those at the end (default: 4 times per run, fewer if that would take "
        "over a twentieth of its time; upstream 10).",
        OUTPUT,
        range="[1, 1e9]",
        needs=(NOT_STREAMING,),
    )
    save_model_epochs: int | None = option(
        None,
        "Epochs between saves of the pipeline, besides the one at the end (default: none, as checkpoints protect the run; "
        "upstream 10).",
        OUTPUT,
        range="[1, 1e9]",
        needs=(NOT_STREAMING,),
    )
    eval_batch_size: int | None = option(
        None,
        "Number of sample images (default: 16; 40 for embedded image sets, 2000 points).",
        OUTPUT,
        decides_result=True,
        range="[1, 1e7]",
    )
    evaluation: bool = option(
        True,
        "Generate, show and measure samples during the run and at its end; --no_evaluation saves the time.",
        EVALUATION,
        study="no",
    )
    distance_samples: int | None = option(
        None,
        "Samples that metrics compare with the data at the end; 0 for none (default: 1000 images if there is a metric for "
        "them, as many points as are held out; fewer after short runs).",
        EVALUATION,
        range="[0, 1e7]",
    )
    checkpointing_steps: int = option(
        500, "Updates between checkpoints to resume from.", OUTPUT, study="arm", range="[1, 1e9]"
    )
    checkpoints_total_limit: int | None = option(
        3, "Checkpoints to keep, the newest ones; 0 for all, as upstream.", OUTPUT, range="[0, 1e9]"
    )
    keep_every: int | None = option(
        None,
        "Updates between checkpoints that are kept permanently, besides the newest ones, for `lrlab "
        "extend` (default: none).",
        OUTPUT,
        range="[1, 1e9]",
    )
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint to resume from: 'latest', which starts a new run if there is none, or a folder.", THIS_START
    )
    logger: str = option(
        "none",
        "Comma-separated trackers: tensorboard, trackio, wandb, mlflow or any other that accelerate supports, besides "
        "lrlab/metrics.jsonl and the plots; upstream tensorboard.",
        DESTINATION,
        study="arm",
    )
    logging_dir: str = option(
        "logs", "Folder for files of trackers such as tensorboard, inside --output_dir.", DESTINATION, needs=(LOGGER,)
    )
    push_to_hub: bool = option(False, "Upload the result to the Hub when the pipeline is saved.", THIS_START)
    hub_token: str | None = option(
        None, "Token for the Hub (default: that of `hf auth login`).", DESTINATION, needs=(PUSH,), repr=False
    )
    hub_model_id: str | None = option(
        None, "Repository on the Hub (default: the name of --output_dir in your namespace).", DESTINATION, needs=(PUSH,)
    )
    hub_private_repo: bool = option(False, "Make a new repository private.", DESTINATION, needs=(PUSH,))
    preflight: bool = option(
        True, "Check data, settings and model before training, and warn of likely mistakes.", DESTINATION
    )
    dry_run: bool = option(
        False,
        "Print the plan of the run with its memory, time and disk space, without training.",
        THIS_START,
        is_first=True,
    )
