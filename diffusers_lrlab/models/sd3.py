"""
The transformer of Stable Diffusion 3, diffusers' `SD3Transformer2DModel`, with class labels in place of texts (arXiv
2403.03206).

The pooled embedding of the text is a class label, one-hot among 1,000, or zeros without one. One token of ones stands for
the text itself, so that its embedding is a learned constant. `StableDiffusion3Pipeline` samples it without text encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import must_be
from .dit import NULL_LABEL, DiT

NUM_CLASSES, TEXT_SIZE = NULL_LABEL, 8  # numbers of the pooled embedding, and of a token


class SD3(DiT):
    """The conventions of `SD3Transformer2DModel`; its size follows the rules of [`DiT`]."""

    def sizes(self, given: Mapping[str, Any], of_data: Mapping[str, Any], num_images: int | None) -> dict[str, Any]:
        sizes = super().sizes(given, of_data, num_images)
        del sizes["num_embeds_ada_norm"]
        return {
            **sizes,
            "caption_projection_dim": sizes["num_attention_heads"] * sizes["attention_head_dim"],
            "joint_attention_dim": TEXT_SIZE,
            "pooled_projection_dim": NUM_CLASSES,
            "pos_embed_max_size": of_data.get("sample_size", 1) // sizes["patch_size"],
        }

    def check_run(self, objective: str, latents: Any) -> None:
        if objective != "flow_matching":
            hint = "its pipeline in diffusers supports no other; --denoiser dit learns any objective"
            raise must_be("--objective", objective, "flow_matching for the denoiser 'sd3'", hint)
        has_shift = latents is not None and bool(latents.shift_factor)
        if not has_shift or latents.autoencoder["class_name"] != "AutoencoderKL":
            hint = "StableDiffusion3Pipeline decodes no others; --denoiser dit learns pixels and any latents"
            got = "pixels"
            if latents is not None:
                got = f"{latents.autoencoder['class_name']} with shift_factor={latents.shift_factor}"
            wanted = "trained on latents of an AutoencoderKL with a shift_factor"
            raise must_be("--denoiser", "sd3", wanted, hint, got=got)

    def check_start(self, arguments: Mapping[str, Any], model: str) -> None:
        for name, wanted in {"pooled_projection_dim": NUM_CLASSES, "joint_attention_dim": TEXT_SIZE}.items():
            if arguments[name] != wanted:
                hint = "class labels replace texts here; start from weights that were trained this way"
                raise must_be(name, arguments[name], str(wanted), hint, of=f"the model {model!r}")

    def prepared(self, model: Any) -> Any:
        """The model, which takes labels in place of embeddings of texts."""
        model.register_forward_pre_hook(_labels_as_texts, with_kwargs=True)
        return model

    def idle_parameters(self, model: Any, has_labels: bool) -> tuple[str, ...]:
        # The last block computes queries of texts, whose attention it drops. Without labels, the pooled embedding is zeros.
        queries = f"transformer_blocks.{model.config.num_layers - 1}.attn.add_q_proj."
        return (queries,) if has_labels else (queries, "time_text_embed.text_embedder.linear_1.")

    def diffusers_pipeline(self, label_dropout: float | None, scheduler: Any, vae: Any) -> str | None:
        return "diffusers:StableDiffusion3Pipeline"


def _labels_as_texts(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call by noisy latents, times and perhaps labels, as one with embeddings of texts."""
    import torch

    if "encoder_hidden_states" in kwargs:
        return args, kwargs
    names = ("hidden_states", "timestep")
    told = {**dict(zip(names, args, strict=False)), **kwargs}
    latents, labels = told["hidden_states"], told.pop("class_labels", None)
    if labels is None:
        labels = torch.full((len(latents),), NULL_LABEL, device=latents.device)
    text = latents.new_ones(len(latents), 1, TEXT_SIZE)
    pooled = (labels[:, None] == torch.arange(NUM_CLASSES, device=labels.device)).to(latents.dtype)
    return (), {**told, "encoder_hidden_states": text, "pooled_projections": pooled}
