"""The trainers whose loops live in modules, and what each option of the launcher acts on there, a row each.

A new trainer is a [`Trainer`] and its rows. It needs new code only if no shape in `trainers/shapes` fits its functions.
Everything else derives from the rows: what is checked before the program starts, `--explain`, and the table of the docs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.registry import markdown_table

OPTIONS = ("timestep_sampler", "loss_weighting", "ema", "log_timesteps")
"""The options that recognise a script by its text, and a trainer by its rows."""

LOOP = "loop"
"""The shape of a method whose text is read in place of the script's."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer, and what its users do in place of options without a row."""

    repository: str
    commit: str  # the tested one
    date: str  # of the commit
    files: tuple[str, ...]  # by which it is recognised, below the folder of its packages
    package: str  # what its programs import
    instead: Mapping[str, str] = field(default_factory=dict)  # by option


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    """A function or method of a trainer that an option acts on."""

    trainer: str
    option: str
    module: str
    attribute: str  # a function, or `Class.method`
    parameters: tuple[str, ...]  # of its signature
    shape: str  # a function in `trainers/shapes`, or `LOOP`
    # The trainer's own options that would have no effect or act twice, with the values that leave them off.
    excludes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    programs: str = "all"  # in which it acts

    @property
    def signature(self) -> str:
        return f"{self.attribute}({', '.join(self.parameters)})"


OFF = (None, False, 0)

TRAINERS: dict[str, Trainer] = {
    "sd-scripts": Trainer(
        repository="https://github.com/kohya-ss/sd-scripts",
        commit="48d368f",
        date="2026-02-16",
        files=("library/train_util.py", "networks/lora.py"),
        package="library",
        instead={
            "log_timesteps": "no hook sees the loss of each image",
        },
    ),
    "musubi-tuner": Trainer(
        repository="https://github.com/kohya-ss/musubi-tuner",
        commit="30c658c",
        date="2026-06-24",
        files=("musubi_tuner/__init__.py", "musubi_tuner/hv_train_network.py"),
        package="musubi_tuner",
        instead={
            "log_timesteps": "its own --show_timesteps plots its density",
        },
    ),
    "SimpleTuner": Trainer(
        repository="https://github.com/bghira/SimpleTuner",
        commit="bc8e6ab",
        date="2026-08-22",
        files=("simpletuner/train.py", "simpletuner/helpers/models/common.py"),
        package="simpletuner",
        instead={
            "loss_weighting": "its own --snr_gamma weights losses",
            "ema": "its own --use_ema averages, LoRA included",
            "log_timesteps": "no hook sees the loss of each image",
        },
    ),
    "ai-toolkit": Trainer(
        repository="https://github.com/ostris/ai-toolkit",
        commit="27a03a9",
        date="2026-08-21",
        files=("toolkit/config_modules.py", "jobs/process/BaseSDTrainProcess.py"),
        package="toolkit",
        instead={
            "loss_weighting": "its table of timesteps does not tell which timesteps a batch has",
            "ema": "its own train.ema_config averages",
            "log_timesteps": "its table of timesteps does not tell which timesteps a batch has",
        },
    ),
    "OneTrainer": Trainer(
        repository="https://github.com/Nerogar/OneTrainer",
        commit="23df383",
        date="2026-08-19",
        files=("modules/trainer/GenericTrainer.py", "modules/modelSetup/mixin/ModelSetupNoiseMixin.py"),
        package="modules",
        instead={
            "loss_weighting": "its own loss_weight_fn weights losses",
            "ema": "its own ema averages",
            "log_timesteps": "no hook sees the loss of each image",
        },
    ),
    "diffusion-pipe": Trainer(
        repository="https://github.com/tdrussell/diffusion-pipe",
        commit="8f83dbf",
        date="2026-08-20",
        files=("utils/common.py", "utils/saver.py", "models/base.py"),
        package="utils",
        instead={
            "loss_weighting": "its loss function does not receive the timesteps",
            "ema": "DeepSpeed's engine has the weights in its own groups",
            "log_timesteps": "its loss function does not receive the timesteps",
        },
    ),
}

_WHOLE_RANGE = {"min_timestep": (None, 0), "max_timestep": (None, 1000)}
_SD_WEIGHTS = {
    **dict.fromkeys(("min_snr_gamma", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss"), OFF),
    "debiased_estimation_loss": OFF,
    "weighting_scheme": (None, "none", "uniform", "logit_normal", "mode"),
    "model_prediction_type": (None, "raw"),
}
_NOISY = ("args", "noise_scheduler", "latents", "noise", "device", "dtype")

ROWS: tuple[TrainerRow, ...] = (
    TrainerRow(
        trainer="sd-scripts",
        option="timestep_sampler",
        module="library.train_util",
        attribute="get_timesteps",
        parameters=("min_timestep", "max_timestep", "b_size", "device"),
        shape="indices_in_range",
        excludes=_WHOLE_RANGE,
        programs="SD 1, SD 2, SDXL",
    ),
    TrainerRow(
        trainer="sd-scripts",
        option="timestep_sampler",
        module="library.flux_train_utils",
        attribute="get_noisy_model_input_and_timesteps",
        parameters=_NOISY,
        shape="noisy_input_and_sigmas",
        excludes=_WHOLE_RANGE,
        programs="Flux, Anima, HunyuanImage",
    ),
    TrainerRow(
        trainer="sd-scripts",
        option="timestep_sampler",
        module="library.lumina_train_util",
        attribute="get_noisy_model_input_and_timesteps",
        parameters=_NOISY,
        shape="noisy_input_and_sigmas",
        excludes=_WHOLE_RANGE,
        programs="Lumina 2",
    ),
    TrainerRow(
        trainer="sd-scripts",
        option="timestep_sampler",
        module="library.sd3_train_utils",
        attribute="get_noisy_model_input_and_timesteps",
        parameters=("args", "latents", "noise", "device", "dtype"),
        shape="noisy_input_and_sigmas_for_data",
        excludes=_WHOLE_RANGE,
        programs="SD 3",
    ),
    # Not `NetworkTrainer.post_process_loss`: its subclasses for flow matching replace it, and not all programs have it.
    TrainerRow(
        trainer="sd-scripts",
        option="loss_weighting",
        module="library.train_util",
        attribute="conditional_loss",
        parameters=("model_pred", "target", "loss_type", "reduction", "huber_c"),
        shape="losses_of_images",
        excludes=_SD_WEIGHTS,
    ),
    TrainerRow(
        trainer="sd-scripts",
        option="ema",
        module="train_network",
        attribute="NetworkTrainer.train",
        parameters=("self", "args"),
        shape=LOOP,
        programs="*_train_network.py",
    ),
    TrainerRow(
        trainer="musubi-tuner",
        option="timestep_sampler",
        module="musubi_tuner.training.trainer_base",
        attribute="NetworkTrainer.get_noisy_model_input_and_timesteps",
        parameters=("self", "args", "noise", "latents", "timesteps", "noise_scheduler", "device", "dtype"),
        shape="noisy_input",
        excludes=_WHOLE_RANGE | {"num_timestep_buckets": (None, 0, 1)},
        programs="*_train_network.py",
    ),
    TrainerRow(
        trainer="musubi-tuner",
        option="loss_weighting",
        module="musubi_tuner.training.trainer_base",
        attribute="compute_loss_weighting_for_sd3",
        parameters=("weighting_scheme", "noise_scheduler", "timesteps", "device", "dtype"),
        shape="factor_of_losses",
        excludes={"weighting_scheme": _SD_WEIGHTS["weighting_scheme"]},
        programs="*_train_network.py",
    ),
    # The average follows the optimizer's steps, which `on_post_optimizer_step` also reports; the loop tells how it saves.
    TrainerRow(
        trainer="musubi-tuner",
        option="ema",
        module="musubi_tuner.training.trainer_base",
        attribute="NetworkTrainer.train",
        parameters=("self", "args"),
        shape=LOOP,
        programs="*_train_network.py",
    ),
    TrainerRow(
        trainer="SimpleTuner",
        option="timestep_sampler",
        module="simpletuner.helpers.models.common",
        attribute="ModelFoundation.sample_flow_sigmas",
        parameters=("self", "batch", "state"),
        shape="sigmas_and_timesteps",
        excludes={"flow_custom_timesteps": (None, "", "None"), "mixflow_enabled": OFF},
        programs="flow matching",
    ),
    TrainerRow(
        trainer="ai-toolkit",
        option="timestep_sampler",
        module="toolkit.samplers.custom_flowmatch_sampler",
        attribute="CustomFlowMatchEulerDiscreteScheduler.set_train_timesteps",
        parameters=("self", "num_timesteps", "device", "timestep_type", "latents", "patch_size"),
        shape="table_of_timesteps",
        programs="flow matching",
    ),
    TrainerRow(
        trainer="OneTrainer",
        option="timestep_sampler",
        module="modules.modelSetup.mixin.ModelSetupNoiseMixin",
        attribute="ModelSetupNoiseMixin._get_timestep_discrete",
        parameters=("self", "num_train_timesteps", "deterministic", "generator", "batch_size", "config", "shift"),
        shape="indices_by_config",
        programs="all but Würstchen",
    ),
    TrainerRow(
        trainer="diffusion-pipe",
        option="timestep_sampler",
        module="utils.common",
        attribute="get_t_distribution",
        parameters=("model_config",),
        shape="table_of_quantiles",
        programs="Wan; a density that does not change",
    ),
)


def rows_of(trainer: str, option: str) -> list[TrainerRow]:
    return [row for row in ROWS if (row.trainer, row.option) == (trainer, option)]


def trainers_table() -> str:
    """All rows, and what there is in place of the others, as a Markdown table."""
    lines = []
    for name, trainer in TRAINERS.items():
        tested = f"[{name}]({trainer.repository}) {trainer.commit} ({trainer.date})"
        for option in OPTIONS:
            for row in rows_of(name, option):
                lines.append((tested, f"`--{option}`", row.programs, f"`{row.module}`", f"`{row.signature}`"))
            if not rows_of(name, option):
                lines.append((tested, f"`--{option}`", "none", "–", f"refused: {trainer.instead[option]}"))
    return markdown_table(("trainer, tested at", "option", "programs", "module", "what it acts on"), lines)
