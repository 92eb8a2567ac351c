"""More models of a few thousand random weights, in the folders that diffusers' example scripts load."""

from pathlib import Path

import diffusers
import torch
import transformers

from .tiny_pipelines import clip_config, clip_tokenizer, letters_tokenizer

_WIDTH = 16  # of CLIP's embeddings in Kandinsky


def sana(folder: Path) -> None:
    sizes = {"head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=32,
        ),
        vae=diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=transformers.Gemma2Model(transformers.Gemma2Config(vocab_size=30, num_key_value_heads=2, **sizes)),
        tokenizer=letters_tokenizer(transformers.GemmaTokenizerFast),
    ).save_pretrained(folder)


def t2i_adapter(folder: Path) -> None:
    """For Stable Diffusion XL with two levels."""
    diffusers.T2IAdapter(
        in_channels=3, channels=(4, 8), num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"
    ).save_pretrained(folder)


def controlnet_sd3(folder: Path) -> None:
    diffusers.SD3ControlNetModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=16,
    ).save_pretrained(folder)


def kandinsky_prior(folder: Path) -> None:
    size = {"hidden_size": _WIDTH, "projection_dim": _WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2}
    prior = diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=8, embedding_dim=_WIDTH, num_layers=1)
    prior.clip_std = torch.nn.Parameter(torch.ones_like(prior.clip_std))  # 0 would make everything 0
    diffusers.KandinskyV22PriorPipeline(
        prior=prior,
        image_encoder=transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(image_size=224, patch_size=56, intermediate_size=16, **size)
        ),
        text_encoder=transformers.CLIPTextModelWithProjection(clip_config(**size)),
        tokenizer=clip_tokenizer(folder.parent / "tokenizer"),
        scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000
        ),
        image_processor=transformers.CLIPImageProcessor(),
    ).save_pretrained(folder)


def kandinsky_decoder(folder: Path) -> None:
    diffusers.KandinskyV22Pipeline(
        unet=diffusers.UNet2DConditionModel(
            in_channels=4,
            out_channels=8,  # mean and variance
            addition_embed_type="image",
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            encoder_hid_dim=_WIDTH,
            encoder_hid_dim_type="image_proj",
            cross_attention_dim=8,
            attention_head_dim=4,
            resnet_time_scale_shift="scale_shift",
        ),
        scheduler=diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012),
        movq=diffusers.VQModel(
            block_out_channels=(32, 64),  # its norms have 32 groups
            down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
            up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            norm_num_groups=8,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        ),
    ).save_pretrained(folder)
    # What AutoPipelineForText2Image loads with it stands in its card.
    (folder / "README.md").write_text("---\nprior:\n- hf-internal-testing/tiny-random-kandinsky-v22-prior\n---\n")
