"""Changes to other trainers whose schedules do not run as their options say: the new lines, and a test of each."""

from __future__ import annotations

from dataclasses import dataclass

from .checkout import Project
from .trainer_tests import COSINE, LENGTH, REX, SD_SCRIPTS_WARMUP, WARMUP


@dataclass(frozen=True)
class Edit:
    """New lines in place of `num_lines` old ones, the first of which is `first`."""

    path: str
    first: str
    new: str
    num_lines: int = 1
    checksum: str = ""  # of several old lines: 16 digits of SHA-256, without their common indentation


@dataclass(frozen=True)
class TrainerChange:
    """A patch of one commit."""

    project: Project
    commit: str  # of the project, that the change was made for
    subject: str
    reason: str
    edits: tuple[Edit, ...]
    test: tuple[str, str]  # path and text


SD_SCRIPTS = Project("sd-scripts", "https://github.com/kohya-ss/sd-scripts", "library/train_util.py")
MUSUBI_TUNER = Project(
    "musubi-tuner", "https://github.com/kohya-ss/musubi-tuner", "src/musubi_tuner/modules/lr_schedulers.py"
)
SIMPLETUNER = Project(
    "SimpleTuner", "https://github.com/bghira/SimpleTuner", "simpletuner/helpers/training/custom_schedule.py"
)
DIFFUSION_PIPE = Project("diffusion-pipe", "https://github.com/tdrussell/diffusion-pipe", "utils/common.py")

_TRAINER_BASE = "src/musubi_tuner/training/trainer_base.py"
_COUNT = (
    "int(args.lr_{name}_steps * num_training_steps) if isinstance(args.lr_{name}_steps, float) else args.lr_{name}_steps"
)
_PER_PROCESS = """\
int(args.lr_{name}_steps * num_training_steps)
if isinstance(args.lr_{name}_steps, float)
else args.lr_{name}_steps * num_processes
"""
_WARMUP_REASON = (
    "accelerate steps the scheduler once per process, and num_training_steps and fractions are multiplied by the number of "
    "processes for that. Numbers of steps were not: on 4 GPUs, a warm-up of 100 lasted 25 updates."
)


def _counts(path: str) -> tuple[Edit, ...]:
    names = ("warmup", "decay")
    return tuple(Edit(path, _COUNT.format(name=name), _PER_PROCESS.format(name=name)) for name in names)


CHANGES = {
    "musubi-rex": TrainerChange(
        MUSUBI_TUNER,
        "30c658c",
        "Start the warm-up of `rex` at its lowest rate",
        "At the first update the scheduler is not yet in its warm-up, so its position after the warm-up was negative and "
        "wrapped around: with a warm-up of 500 of 1,000 steps the first update ran at the full learning rate.",
        (
            Edit(
                MUSUBI_TUNER.marker,
                "if step_after >= remaining_steps or step_after == -1 or remaining_steps <= 0:",
                "if step_after >= remaining_steps or step_after < 0 or remaining_steps <= 0:\n",
            ),
        ),
        ("tests/test_rex_lr.py", REX),
    ),
    "musubi-warmup": TrainerChange(
        MUSUBI_TUNER,
        "30c658c",
        "Let warm-up and decay last as many updates on several processes",
        _WARMUP_REASON,
        _counts(_TRAINER_BASE),
        ("tests/test_lr_warmup.py", WARMUP),
    ),
    "sd-scripts-warmup": TrainerChange(
        SD_SCRIPTS,
        "48d368f",
        "Let warm-up and decay last as many updates on several processes",
        _WARMUP_REASON,
        _counts(SD_SCRIPTS.marker),
        ("tests/test_lr_warmup.py", SD_SCRIPTS_WARMUP),
    ),
    "diffusion-pipe-length": TrainerChange(
        DIFFUSION_PIPE,
        "8f83dbf",
        "End the learning rate schedule with the run, also after a warm-up",
        "The warm-up was added to the schedule's length: with 50 steps of 200, `linear` ended at a quarter of the peak.",
        (
            Edit(
                "train.py",
                "scheduler_type = config.get('lr_scheduler', 'constant')",
                "scheduler_type = config.get('lr_scheduler', 'constant')\n"
                "# The warm-up is a part of the run.\n"
                "decay_steps = max(config['epochs'] * steps_per_epoch - config['warmup_steps'], 1)\n",
            ),
            Edit(
                "train.py",
                "elif scheduler_type == 'linear':",
                "elif scheduler_type == 'linear':\n    lr_scheduler = torch.optim.lr_scheduler.LinearLR("
                "optimizer, start_factor=1.0, end_factor=0.0, total_iters=decay_steps)\n",
                2,
                "f80f10c227e30a5f",
            ),
            Edit(
                "train.py",
                "elif scheduler_type == 'cosine':",
                "elif scheduler_type == 'cosine':\n    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR("
                "optimizer, T_max=decay_steps, eta_min=1e-6)\n",
                2,
                "1a24d8763962f093",
            ),
        ),
        ("test/test_lr_length.py", LENGTH),
    ),
    "simpletuner-cosine": TrainerChange(
        SIMPLETUNER,
        "bc8e6ab",
        "Let `cosine` fall once over the run, after its warm-up",
        "`cosine` used lr_warmup_steps as the half period of a wave that never ends, and had no warm-up: with 500 of 1,800 "
        "steps it reached its lowest value at update 500 and the peak again at 1,000.",
        (
            Edit(
                SIMPLETUNER.marker,
                'elif args.lr_scheduler == "cosine":',
                """\
elif args.lr_scheduler == "cosine":
    logger.info("Using Cosine learning rate scheduler.")
    num_steps = args.max_train_steps * accelerator.num_processes
    num_warmup_steps = args.lr_warmup_steps * accelerator.num_processes
    if num_warmup_steps >= num_steps:
        logger.warning("lr_warmup_steps is not below max_train_steps: the cosine runs without a warm-up.")
        num_warmup_steps = 0
    lowest = float(args.lr_end) / optimizer.defaults["lr"]

    def cosine(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        progress = min((step - num_warmup_steps) / (num_steps - num_warmup_steps), 1.0)
        return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2

    lr_scheduler = LambdaLR(optimizer, cosine)
""",
                12,
                "2fb2d6d911b82181",
            ),
        ),
        ("tests/test_cosine_lr.py", COSINE),
    ),
}
