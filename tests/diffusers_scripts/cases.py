"""Which of diffusers' scripts are run, on what, with which arguments."""

from dataclasses import dataclass
from pathlib import Path

from . import tiny_pipelines

_LORA = ("--rank", "2")
_PROMPT = ("--instance_prompt", "a red square")


@dataclass(frozen=True)
class Case:
    """A script by its path in diffusers' `examples`, the pipeline that it trains, and what it needs besides."""

    script: str
    pipeline: str
    data: str  # "images", "pairs" or "folder"
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.script).stem.removeprefix("train_")


CASES = {
    case.name: case
    for case in (
        Case(
            "unconditional_image_generation/train_unconditional.py",
            "unconditional",
            "images",
            ("--ddpm_num_inference_steps", "2"),
        ),
        Case("text_to_image/train_text_to_image_lora.py", "stable_diffusion", "images", _LORA),
        Case("text_to_image/train_text_to_image_lora_sdxl.py", "stable_diffusion_xl", "images", _LORA),
        Case("dreambooth/train_dreambooth_lora_flux.py", "flux", "folder", (*_LORA, *_PROMPT, "--max_sequence_length=16")),
        Case("dreambooth/train_dreambooth_lora_lumina2.py", "lumina2", "folder", (*_LORA, *_PROMPT)),
        Case(
            "controlnet/train_controlnet.py",
            "stable_diffusion_of_factor_8",
            "pairs",
            ("--conditioning_image_column", "other", "--caption_column", "text"),
        ),
    )
}


def command(
    case: Case,
    examples: Path,
    inputs: Path,
    output: Path,
    updates: int,
    accumulation: int = 1,
    batch_size: int = 2,
    warmup: int = 2,
) -> list[str]:
    """A script and its own arguments; pipelines and images are made in `inputs` where they are missing."""
    pipeline = inputs / case.pipeline / "pipeline"
    if not pipeline.exists():
        tiny_pipelines.make(case.pipeline, inputs)
    images = inputs / case.data
    if not images.exists():
        tiny_pipelines.make_images(images, others=case.data == "pairs", captions=case.data != "folder")
    model = "--model_config_name_or_path" if case.pipeline == "unconditional" else "--pretrained_model_name_or_path"
    data = "--instance_data_dir" if case.data == "folder" else "--train_data_dir"
    given = {
        model: pipeline,
        data: images,
        "--output_dir": output,
        "--resolution": 16 if case.pipeline == "unconditional" else 32,
        "--train_batch_size": batch_size,
        "--gradient_accumulation_steps": accumulation,
        "--learning_rate": 1e-3,
        "--lr_warmup_steps": warmup,
        "--lr_scheduler": "cosine",
        "--checkpointing_steps": 1000,
    }
    if case.pipeline == "unconditional":  # its length is told in epochs
        given |= {"--num_epochs": -(-updates * accumulation * batch_size // 8), "--save_model_epochs": 1000}
        given |= {"--save_images_epochs": 1000}
    else:
        given |= {"--max_train_steps": updates, "--seed": 0}
    pairs = [str(part) for option in given.items() for part in option]
    return [str(examples / case.script), *pairs, *case.arguments]
