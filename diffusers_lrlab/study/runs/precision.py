"""Precisions of the matrix products of a study; float32 unless requested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import LabError

if TYPE_CHECKING:
    import torch


class Precision(NamedTuple):
    """A precision, and the device type that supports it (`None` for all)."""

    description: str
    device: str | None


PRECISIONS = {
    "fp32": Precision("products in float32", None),
    "bf16": Precision("bfloat16 products with float32 sums, on CPUs that support them", "cpu"),
    "tf32": Precision("TF32 products with float32 sums, on NVIDIA GPUs", "cuda"),
}


def check_precision(name: str, device: torch.device) -> None:
    """Raises a `LabError` for a precision that is unknown, or that this device does not support."""
    if name not in PRECISIONS:
        raise LabError(f"There is no precision {name!r}. Known: {', '.join(PRECISIONS)}.")
    needed = PRECISIONS[name].device
    if needed not in (None, device.type):
        raise LabError(f"--precision {name} is for {needed.upper()}s, and the study runs on {device.type}. Use fp32.")


def precision_warning(name: str, device: torch.device) -> str | None:
    """A warning if this CPU does not compute products in bfloat16 as requested, else `None`."""
    if name != "bf16" or device.type != "cpu" or products_are_rounded(name):
        return None
    return (
        "--precision bf16 has no effect on this CPU: oneDNN has no faster bfloat16 products for it, so products of float32 "
        "matrices stay in float32. Leave it out."
    )


def products_are_rounded(name: str) -> bool:
    """Whether a CPU rounds the factors of products to bfloat16 under this precision; torch does not report it."""
    import torch

    factor = torch.full((256, 256), 1 + 2**-12)  # 1 in bfloat16
    with products_in(name, factor.device):
        return bool((factor @ factor == 256).all())


@contextmanager
def products_in(name: str, device: torch.device) -> Iterator[None]:
    """Sets the precision of float32 matrix products for all threads of the process, inside this block."""
    import torch

    value: bool | str
    backends: Any = torch.backends
    if device.type == "cuda":
        # The older name, which accelerate sets too: torch refuses to read it once the newer one was set.
        settings, attribute, value = backends.cuda.matmul, "allow_tf32", name == "tf32"
        before = settings.fp32_precision == "tf32"
    else:
        # "none" means the global setting of torch.
        settings, attribute, value = backends.mkldnn.matmul, "fp32_precision", "bf16" if name == "bf16" else "none"
        before = settings.fp32_precision
    setattr(settings, attribute, value)
    try:
        yield
    finally:
        setattr(settings, attribute, before)
