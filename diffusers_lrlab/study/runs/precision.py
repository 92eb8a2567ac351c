"""Cheaper precisions for the products of a study, by name and never unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import LabError

if TYPE_CHECKING:
    import torch


class Precision(NamedTuple):
    """A precision, and the type of device that has it (`None` for all)."""

    description: str
    device: str | None


PRECISIONS = {
    "fp32": Precision("products in float32", None),
    "bf16": Precision("products of bfloat16 with sums in float32, on CPUs that have them", "cpu"),
    "tf32": Precision("products of TF32 with sums in float32, on NVIDIA GPUs", "cuda"),
}


def check_precision(name: str, device: torch.device) -> None:
    """Raises a `LabError` for a precision that is unknown, or that this device lacks."""
    if name not in PRECISIONS:
        raise LabError(f"There is no precision {name!r}. Known: {', '.join(PRECISIONS)}.")
    needed = PRECISIONS[name].device
    if needed not in (None, device.type):
        raise LabError(f"--precision {name} is for {needed.upper()}s, and the study runs on {device.type}. Use fp32.")


def precision_warning(name: str, device: torch.device) -> str | None:
    """A warning if products asked for in bfloat16 are none on this CPU, else `None`."""
    if name != "bf16" or device.type != "cpu" or products_are_rounded(name):
        return None
    return (
        "--precision bf16 has no effect on this CPU: its products of float32 matrices stay in float32, as oneDNN has no "
        "faster ones in bfloat16 for it. Leave it out."
    )


def products_are_rounded(name: str) -> bool:
    """Whether a CPU rounds the factors of products to bfloat16 under this precision: tried, as torch does not say."""
    import torch

    factor = torch.full((256, 256), 1 + 2**-12)  # 1 in bfloat16
    with products_in(name, factor.device):
        return bool((factor @ factor == 256).all())


@contextmanager
def products_in(name: str, device: torch.device) -> Iterator[None]:
    """Products of float32 matrices are computed in this precision, by all threads of the process, inside this block only."""
    import torch

    value: bool | str
    backends: Any = torch.backends
    if device.type == "cuda":
        # Its older name, by which accelerate sets it, too: torch refuses to read that one if the newer was set last.
        settings, attribute, value = backends.cuda.matmul, "allow_tf32", name == "tf32"
        before = settings.fp32_precision == "tf32"
    else:
        # "none" is torch's own word for: as the rest of torch is set.
        settings, attribute, value = backends.mkldnn.matmul, "fp32_precision", "bf16" if name == "bf16" else "none"
        before = settings.fp32_precision
    setattr(settings, attribute, value)
    try:
        yield
    finally:
        setattr(settings, attribute, before)
