"""torch's Muon for a whole model: torch's takes matrices only, and a UNet consists mostly of convolutions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """
    Muon for parameters of two or more dimensions, AdamW for biases and norms, with one learning rate.

    The kernel of a convolution is treated as a matrix (out channels, in channels x height x width). Muon's updates are
    scaled to the root mean square of AdamW's (arXiv 2502.16982, eq. 4), so that one learning rate suits both. Parameters
    must be contiguous.
    """

    def __init__(self, params: list[Any], lr: float, momentum: float, betas: tuple[float, float], weight_decay: float):
        given = params if isinstance(params[0], dict) else [{"params": params}]
        groups: list[dict[str, Any]] = []
        for group in given:
            matrices = [parameter for parameter in group["params"] if parameter.ndim >= 2]
            rest = [parameter for parameter in group["params"] if parameter.ndim < 2]
            parts = ({"params": matrices, "momentum": momentum}, {"params": rest, "betas": betas})
            groups += [{**group, **part} for part in parts if part["params"]]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._matrices: list[torch.nn.Parameter] = []
        self._flat: list[torch.nn.Parameter] = []
        self._inner = [self._make_inner(group) for group in self.param_groups]

    def _make_inner(self, group: dict[str, Any]) -> Optimizer:
        options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if "momentum" not in group:
            return AdamW(group["params"], betas=group["betas"], **options)
        flat = [torch.nn.Parameter(_as_matrix(matrix.detach())) for matrix in group["params"]]
        self._matrices += group["params"]
        self._flat += flat
        return Muon(flat, momentum=group["momentum"], adjust_lr_fn="match_rms_adamw", **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for flat, matrix in zip(self._flat, self._matrices, strict=True):
            # At every step, since moving the model or clearing its gradients invalidates earlier views.
            flat.data = _as_matrix(matrix.data)
            flat.grad = None if matrix.grad is None else _as_matrix(matrix.grad)
        for group, optimizer in zip(self.param_groups, self._inner, strict=True):
            optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"param_groups": groups, "state": [optimizer.state_dict() for optimizer in self._inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self._inner, state_dict["state"], strict=True):
            optimizer.load_state_dict(state)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    # view, not flatten, which could copy, so that the update would be lost.
    return tensor.view(tensor.shape[0], -1)
