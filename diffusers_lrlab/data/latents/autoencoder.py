"""Autoencoders of diffusers: loaded, identified by the hash of their weights, and held against images."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import LabError, must_be
from ...core.files import expanded
from ...core.words import counted

if TYPE_CHECKING:
    import torch

_REMEDY = "give a Hub id, or a folder with a config.json and weights; --subfolder names a folder inside either"


class Source(NamedTuple):
    """Where an autoencoder is loaded from."""

    class_name: str  # in diffusers
    name_or_path: str
    subfolder: str | None
    revision: str | None  # the commit, of a repository on the Hub


def find_autoencoder(name: str, subfolder: str | None, revision: str | None, cache_dir: str | None) -> Source:
    """The class and the commit of an autoencoder, from its configuration alone."""
    import diffusers

    path = expanded(name)
    is_folder = path.is_dir()
    if not is_folder and (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise must_be("--vae", name, "a Hub id or a folder that exists", _REMEDY)
    if is_folder and revision is not None:
        raise must_be("--revision", revision, "left out for a folder", "only repositories on the Hub have revisions")
    where = str(path.resolve()) if is_folder else name
    try:
        config, commit = diffusers.AutoencoderKL.load_config(
            where, subfolder=subfolder, revision=revision, cache_dir=cache_dir, return_commit_hash=True
        )
    except (OSError, ValueError) as error:
        raise LabError(f"--vae {name!r} cannot be read: {error} Hint: {_REMEDY}.") from None
    class_name = str(config.get("_class_name"))
    model_class = getattr(diffusers, class_name, None)
    if not (isinstance(model_class, type) and hasattr(model_class, "encode") and hasattr(model_class, "decode")):
        hint = "give the autoencoder itself; for a whole pipeline, add --subfolder vae"
        raise must_be("--vae", name, "an autoencoder of diffusers", hint, got=f"a {class_name}")
    if config.get("latents_mean") is not None:
        hint = "this one normalises each channel by latents_mean and latents_std; choose another"
        raise must_be("--vae", name, "an autoencoder with one scaling_factor", hint, got=f"a {class_name}")
    return Source(class_name, where, subfolder, None if is_folder else commit)


def load_autoencoder(source: Source, cache_dir: str | None) -> Any:
    """The autoencoder in float32, for inference."""
    import diffusers

    model_class = getattr(diffusers, source.class_name)
    where: dict[str, Any] = {"subfolder": source.subfolder, "revision": source.revision, "cache_dir": cache_dir}
    given = {name: value for name, value in where.items() if value is not None}
    try:
        model = model_class.from_pretrained(source.name_or_path, **given)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error)
        raise LabError(f"--vae {source.name_or_path!r} cannot be loaded: {reason} Hint: {_REMEDY}.") from None
    return model.float().eval().requires_grad_(False)


def weights_sha256(model: Any) -> str:
    """A hash of the weights, the same for each file format and location."""
    import torch

    found = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        found.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        found.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def scaling_of(model: Any) -> tuple[float, float]:
    """The factor and the shift by which a diffusion model sees latents: `(latent - shift) * factor`."""
    factor, shift = (getattr(model.config, name, None) for name in ("scaling_factor", "shift_factor"))
    return 1.0 if factor is None else float(factor), 0.0 if shift is None else float(shift)


def encoded(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    """The latents of images: mean and standard deviation, or the mean alone of a deterministic autoencoder."""
    output = model.encode(images)
    if hasattr(output, "latent_dist"):
        return [output.latent_dist.mean, output.latent_dist.std]
    if hasattr(output, "latent"):
        return [output.latent]
    wanted = "an autoencoder whose encode() gives latent_dist (AutoencoderKL) or latent (AutoencoderDC)"
    raise must_be("--vae", type(model).__name__, wanted, "choose another")


def image_channels_of(model: Any, name: str) -> int:
    """The channels of images that an autoencoder takes, 1 or 3."""
    channels = getattr(model.config, "in_channels", 3)
    if channels not in (1, 3):
        wanted = "an autoencoder of grey or RGB images"
        raise must_be("--vae", name, wanted, "choose another", got=counted(channels, "channel"))
    return channels


def check_size(model: Any, name: str, channels: int, resolution: int) -> tuple[Any, bool]:
    """
    The shape of an image's latent, and whether it is deterministic, found without computing; a `LabError` if the decoded
    image had another size.
    """
    import torch

    with torch.device("meta"), torch.no_grad():
        copy = type(model).from_config(model.config).eval()
        images = torch.empty(1, channels, resolution, resolution)
        try:
            latents = encoded(copy, images)
            decoded = copy.decode(latents[0], return_dict=False)[0]
        except LabError:
            raise
        except Exception as error:  # of any type, as of layers that do not fit
            wanted = f"an autoencoder of images of {resolution}x{resolution} pixels"
            raise must_be("--vae", name, wanted, f"{error}", got=f"a {type(model).__name__} that fails") from error
    if decoded.shape != images.shape:
        size = " x ".join(map(str, decoded.shape[1:]))
        factor = max(1, round(resolution / latents[0].shape[-1]))
        hint = f"--vae {name} would decode to {size}; it reduces images by {factor}"
        raise must_be("--resolution", resolution, "a size that the autoencoder reproduces", hint)
    return tuple(latents[0].shape[1:]), len(latents) == 1
