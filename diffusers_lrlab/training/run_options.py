"""The options that say how long a run is, and what it writes where."""

from dataclasses import dataclass
from typing import Literal

from ..core.options import (
    DESTINATION,
    DRAWS,
    EVALUATION,
    OUTPUT,
    SPEED,
    THIS_START,
    UPDATE,
    WHOLE_RUN,
    Need,
    option,
)
from .learning_options import HELD_OUT

PUSH = Need("--push_to_hub", lambda config: config.push_to_hub)
LOGGER = Need("--logger with a tracker", lambda config: config.logger != "none")
A_RUN = Need("--dry_run", lambda config: not config.dry_run, is_absence=True)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Parameters that control the length, speed and randomness of the run."""

    _argument_group_name = "length, speed and randomness"

    num_epochs: int | None = option(
        None,
        "Passes over the data; 100 unless --max_train_steps is given, and 10,000 updates for points.",
        WHOLE_RUN,
        range="[1, 1e9]",
    )
    max_train_steps: int | None = option(
        None, "Optimizer updates of the run; excludes --num_epochs.", WHOLE_RUN, range="[1, 1e9]"
    )
    train_batch_size: int | None = option(
        None,
        "Images per process and micro-batch; 16, 64 for digits, 256 points.",
        UPDATE,
        finder="uses",
        may_change_on_resume=True,
        range="[1, 1e7]",
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches per optimizer update.", UPDATE, finder="uses", may_change_on_resume=True, range="[1, 1e6]"
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        None,
        "Precision of the forward pass; accelerate's setting if not given, else bf16 on GPUs that compute in it.",
        UPDATE,
        may_change_on_resume=True,
    )
    compile: bool = option(
        False,
        "Compile the model with torch.compile for training, or the blocks that it declares to repeat: faster after a first "
        "minute, and rounded in another way. `accelerate launch --dynamo_backend` chooses another backend than inductor.",
        UPDATE,
        may_change_on_resume=True,  # what was used is compared
        study="no",
    )
    channels_last: bool = option(
        False,
        "Keep the model's convolutions and the images channels last, which 16-bit convolutions of GPUs are fastest with; "
        "rounded in another way.",
        UPDATE,
        kinds=("images",),
    )
    allow_tf32: bool = option(
        False,
        "Multiply float32 matrices in TF32, on NVIDIA GPUs from Ampere on: faster, with 10 bits of mantissa in the place "
        "of 23. Convolutions do so anyway, as torch has it.",
        UPDATE,
        study="no",
    )
    seed: int = option(
        0,
        "Seed of the initial weights, data order, timesteps and noise.",
        DRAWS,
        finder="uses",
        study="no",
        range="[0, 9223372036854775807]",
    )
    cpu_threads: int = option(
        0,
        "Threads per process, without a GPU; 0 takes OMP_NUM_THREADS, or shares the cores among the processes.",
        SPEED,
        study="no",
        range="[0, 1024]",
    )
    plugins: str | None = option(
        None,
        "Python files or modules, with commas, that register schedules, samplers, optimizers or metrics of your own.",
        SPEED,
        is_repeated=False,
        is_path=True,
        aliases=("--import",),
    )
    local_rank: int = option(
        -1, "Set by launchers; not for use by hand.", SPEED, study="no", is_repeated=False, range="[-1, 1e6]"
    )


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Parameters that control what is written, when, and where it goes."""

    _argument_group_name = "output"

    output_dir: str | None = option(
        None,
        "Folder of the run; OBJECTIVE-DATASET-RESOLUTION, so that runs on other data do not meet (upstream ddpm-model-64).",
        DESTINATION,
        finder="uses",
    )
    overwrite_output_dir: bool = option(
        False, "Replace the run that output_dir holds; other files there stay. Resuming goes first.", THIS_START
    )
    logging_steps: int = option(10, "Updates between rows of lrlab/metrics.jsonl.", WHOLE_RUN, range="[1, 1e9]")
    validation_steps: int | None = option(
        None,
        "Updates between validations; 20 over the run, fewer if that took more than a tenth of its time.",
        WHOLE_RUN,
        range="[1, 1e9]",
        needs=(HELD_OUT,),
    )
    save_images_epochs: int | None = option(
        None,
        "Epochs between sample images; 4 times over the run, fewer if that took more than a twentieth of its time, and at "
        "its end (upstream every 10 epochs).",
        OUTPUT,
        range="[1, 1e9]",
    )
    save_model_epochs: int | None = option(
        None,
        "Epochs between saves of the pipeline; only at the end, as checkpoints guard the rest (upstream every 10 epochs).",
        OUTPUT,
        range="[1, 1e9]",
    )
    eval_batch_size: int | None = option(
        None, "Number of sample images; 16, 40 for digits, 2000 points.", OUTPUT, decides_result=True, range="[1, 1e7]"
    )
    evaluation: bool = option(
        True,
        "Draw samples during the run and at its end, measure them, and show them; a quick try may do without.",
        EVALUATION,
        study="no",
    )
    frechet_samples: int | None = option(
        None,
        "Samples for the Frechet distance at the end of the run, on digits, and for registered metrics of images; 1000 if "
        "there is one, fewer for a run of less than 150,000 images, 0 turns them off.",
        EVALUATION,
        range="[0, 1e7]",
    )
    distance_samples: int | None = option(
        None,
        "Samples for the distances at the end of a run on points; as many as points are held out, fewer for a run of less "
        "than 2,560,000 points, 0 turns them off.",
        EVALUATION,
        range="[0, 1e7]",
        kinds=("points",),
    )
    checkpointing_steps: int = option(
        500, "Updates between checkpoints to resume from.", OUTPUT, study="arm", range="[1, 1e9]"
    )
    checkpointing_min_seconds: float = option(
        0.0,
        "Least time between checkpoints, for slow disks: one that is due sooner is left out, but for the last one.",
        OUTPUT,
        range="[0, 1e6]",
    )
    checkpoints_total_limit: int | None = option(
        3,
        "Checkpoints that are kept, oldest removed first; more would only fill the disk (upstream keeps all; here 0 does).",
        OUTPUT,
        range="[0, 1e9]",
    )
    resume_from_checkpoint: str | None = option(
        None, "'latest', which starts a new run where there is none, or the folder of a checkpoint.", THIS_START
    )
    logger: str = option(
        "none",
        "Trackers, several with commas: tensorboard, trackio, wandb, mlflow and whatever else accelerate knows. They are "
        "besides lrlab/metrics.jsonl and the plots, which are always written (upstream tensorboard).",
        DESTINATION,
        study="arm",
    )
    logging_dir: str = option(
        "logs", "Folder for the files of trackers such as tensorboard, inside output_dir.", DESTINATION, needs=(LOGGER,)
    )
    push_to_hub: bool = option(False, "Upload the result to the Hub when the pipeline is saved.", THIS_START)
    hub_token: str | None = option(
        None, "Token for the Hub; the one of `hf auth login` if not given.", DESTINATION, needs=(PUSH,), repr=False
    )
    hub_model_id: str | None = option(
        None, "Repository on the Hub; the name of output_dir in your namespace.", DESTINATION, needs=(PUSH,)
    )
    hub_private_repo: bool = option(False, "Make the repository private if it is new.", DESTINATION, needs=(PUSH,))
    hub_push_every: int | None = option(
        None,
        "Updates between uploads of the pipeline during training, which goes on meanwhile; at the end only if not given.",
        DESTINATION,
        range="[1, 1e9]",
        needs=(PUSH,),
    )
    hub_license: str | None = option(
        None, "License of the model, for its card, such as apache-2.0; none if not given.", OUTPUT
    )
    preflight: bool = option(
        True, "Check data, settings and model before training, and say what looks like a mistake.", DESTINATION
    )
    sanity: bool = option(
        False,
        "Before training, overfit one batch in 150 updates, and stop if the loss does not fall to half.",
        THIS_START,
        needs=(A_RUN,),
    )
    profile: int | None = option(
        None,
        "Updates to profile after the first 7: where their time goes is printed, and lrlab/profile.json.gz is a trace of "
        "them for Perfetto. Training is the same, and slower meanwhile.",
        THIS_START,
        range="[1, 50]",
        needs=(A_RUN,),
    )
    dry_run: bool = option(
        False, "Print the plan of the run, with the memory, time and disk that it will take, and stop.", THIS_START
    )
