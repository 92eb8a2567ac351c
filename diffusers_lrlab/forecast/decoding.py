"""The memory of an autoencoder that decodes samples, from a pass over fake tensors."""

import functools
from typing import Any, NamedTuple

import torch

from ..pipelines.latent_image import images_at_once
from ..pipelines.reference import Reference
from ..training.plan import Plan


class DecodingBytes(NamedTuple):
    """Bytes on the device that samples."""

    weights: int
    activations: int  # of the largest pass


def decoding_bytes(plan: Plan, device: str) -> DecodingBytes:
    """The memory of the autoencoder in the pipeline of a run; nothing where there is none."""
    part = plan.kind.pipeline_parts(plan.config).get("vae")
    if part is None:
        return DecodingBytes(0, 0)
    model = part.load(plan.config.cache_dir) if isinstance(part, Reference) else part
    weights = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    config = plan.config
    samples = max(config.eval_batch_size, config.frechet_samples or 0) if config.evaluation else 0
    num = min(samples, plan.kind.sampling_batch, images_at_once(model, plan.item_shape))
    return DecodingBytes(weights, _activations(model, (num, *plan.item_shape), device) if num else 0)


@functools.lru_cache(maxsize=8)
def _activations(model: Any, shape: tuple[int, ...], device: str) -> int:
    """Peak bytes of decoding latents of this shape, besides the weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(), torch.device(device), torch.no_grad():
        copy, latents = type(model).from_config(model.config).eval(), torch.zeros(shape)
        tracker = MemTracker()
        tracker.track_external(copy, latents)
        with tracker:
            copy.decode(latents, return_dict=False)
    found = tracker.get_tracker_snapshot("peak").items()
    (snapshot,) = (bytes_of for where, bytes_of in found if where.type == device)
    return int(sum(size for part, size in snapshot.items() if getattr(part, "name", str(part)) not in ("PARAM", "Total")))
