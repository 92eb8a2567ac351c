"""Schedule-free AdamW whose average forgets at a pace of its own, apart from beta1."""

from collections.abc import Callable
from typing import Any

from schedulefree import AdamWScheduleFree


class RefinedAdamWScheduleFree(AdamWScheduleFree):
    """
    The refined form of arXiv 2507.09846: an update moves the average towards the weights by min(1, (1 - beta1) C w / W),
    where w is the square of the highest rate so far, and W is the sum of w so far. With C = 1 / (1 - beta1), it is the
    optimizer of the package.
    """

    def __init__(self, params: Any, lr: float, decoupling: float, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)
        for group in self.param_groups:
            group.update(decoupling=decoupling, all_weights=0.0)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            weight = max(group["lr"], group["lr_max"]) ** group["weight_lr_power"]
            group["all_weights"] += weight
            if weight > 0:
                factor = (1 - group["betas"][0]) * group["decoupling"]
                share = min(1.0, factor * weight / group["all_weights"])
                group["weight_sum"] = weight / share - weight  # the package adds the weight and divides it by the sum
        return super().step(closure)
