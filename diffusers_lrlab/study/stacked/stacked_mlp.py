"""Many [`MLPDenoiser`]s as one computation: weights `(members, out, in)`, forward and backward by hand."""

from typing import Any

import torch

from .matmul_backends import BACKENDS, STOCK, Product


class StackedMLP:
    """
    Networks of one architecture, whose weights lie in common tensors.

    The parameters of each network become views of these, and so do their gradients: what an optimizer does to a network
    happens in the stack. Nothing is computed across networks, so that none can disturb another: where `hidden_size` is a
    multiple of 4, no bit of a network depends on which others there are, and elsewhere only rounding does (MKL's depends on
    addresses modulo 16). This holds in a single thread, such as a worker has; several threads share products out by their
    number.

    The models have one configuration, device and dtype, and stay usable by themselves. `batch` is the points of each in an
    update; `backends` go from the kinds of products to names in `BACKENDS`, torch's own if not given.
    """

    def __init__(self, models: list[Any], batch: int, backends: dict[str, str] | None = None):
        self.models, self.batch = models, batch
        linears = [[model.input, *model.blocks, model.output] for model in models]
        layers = list(zip(*linears, strict=True))
        self.weights, self.weight_grads = _stacked([[linear.weight for linear in layer] for layer in layers])
        self.biases, self.bias_grads = _stacked([[linear.bias for linear in layer] for layer in layers])
        self._product = {kind: BACKENDS[name](kind) for kind, name in (backends or STOCK).items()}
        # Too narrow for anything but torch's.
        self._output_product = {kind: BACKENDS[name](kind) for kind, name in STOCK.items()}
        like, size = self.weights[0], (len(models), batch, models[0].config.hidden_size)
        self._hidden = [like.new_empty(size) for _ in self.weights[1:]]
        self._active = [like.new_empty(size) for _ in self.weights[1:]]
        self._gradient, self._through = like.new_empty(size), like.new_empty(size)
        self._output = like.new_empty(len(models), batch, models[0].config.dimension)
        self._embedding = like.new_empty(0)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """`(members, ...)` each, in the order of a network's parameters."""
        return [grad for pair in zip(self.weight_grads, self.bias_grads, strict=True) for grad in pair]

    @property
    def num_bytes(self) -> int:
        """Of weights, gradients and buffers of a pass."""
        rows = (*self.weights, *self.biases, *self._hidden, *self._active, self._gradient, self._through, self._output)
        embedding = self.batch * len(self.models) * self.weights[0].shape[2] * self.weights[0].element_size()
        return sum(tensor.nbytes for tensor in (*rows, *self.gradients)) + embedding

    def forward(self, points: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """What each network makes of its points, `(members, batch, dimension)` like these; valid until the next call."""
        flat = self.models[0].embed(points.flatten(0, 1), timesteps.flatten())
        self._embedding = flat.to(self.weights[0].dtype).view(len(points), self.batch, -1)
        hidden, active = self._hidden, self._active
        hidden[0].copy_(self.biases[0][:, None].expand_as(hidden[0]))
        self._product["forward"](self._embedding, self.weights[0], hidden[0], True)
        for index, after in enumerate(hidden[1:], start=1):
            torch.clamp_min(hidden[index - 1], 0, out=active[index - 1])
            torch.add(hidden[index - 1], self.biases[index][:, None], out=after)
            self._product["forward"](active[index - 1], self.weights[index], after, True)
        torch.clamp_min(hidden[-1], 0, out=active[-1])
        self._output.copy_(self.biases[-1][:, None].expand_as(self._output))
        self._output_product["forward"](active[-1], self.weights[-1], self._output, True)
        return self._output

    def backward(self, gradient: torch.Tensor) -> None:
        """Fills the gradients of all parameters, from that of the output: `(members, batch, dimension)`."""
        through, total = self._through, self._gradient
        self._layer_gradients(self._output_product, -1, gradient, self._active[-1])
        self._output_product["input_gradient"](gradient, self.weights[-1], total, False)
        _where_positive(total, self._active[-1])
        for index in range(len(self.weights) - 2, 0, -1):
            self._layer_gradients(self._product, index, total, self._active[index - 1])
            self._product["input_gradient"](total, self.weights[index], through, False)
            total.add_(_where_positive(through, self._active[index - 1]))
        self._layer_gradients(self._product, 0, total, self._embedding)

    def _layer_gradients(
        self, product: dict[str, Product], index: int, gradient: torch.Tensor, values: torch.Tensor
    ) -> None:
        product["weight_gradient"](gradient, values, self.weight_grads[index], False)
        torch.sum(gradient, 1, out=self.bias_grads[index])

    def clip(self, max_norms: torch.Tensor) -> torch.Tensor:
        """
        Clips the gradient of each network to its own norm, as `torch.nn.utils.clip_grad_norm_` does.

        From the largest norms `(members,)`, infinite for networks that are not clipped, to the norms before.
        """
        each = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in self.gradients])
        # One after another: torch adds up the norms of a single member in another order, and rounds otherwise.
        squares = torch.zeros_like(each[0])
        for norm in each:
            squares += norm.square()
        norms = squares.sqrt()
        factors = (max_norms / (norms + 1e-6)).clamp(max=1.0)
        for grad in self.gradients:
            grad.mul_(factors.view(-1, *(1 for _ in grad.shape[1:])))
        return norms


def _stacked(parameters: list[list[torch.nn.Parameter]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Common tensors of the values of each list, and of their gradients; the parameters become views of them."""
    values = [torch.stack([parameter.detach() for parameter in some]) for some in parameters]
    grads = [torch.zeros_like(value) for value in values]
    for some, value, grad in zip(parameters, values, grads, strict=True):
        for parameter, its_value, its_grad in zip(some, value, grad, strict=True):
            parameter.data, parameter.grad = its_value, its_grad
    return values, grads


def take_out(model: Any) -> None:
    """Gives a network weights of its own again: views of them would keep, and save, the whole stack."""
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None


def _where_positive(gradient: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The gradient behind a ReLU whose output was `active`, in place."""
    return torch.ops.aten.threshold_backward.grad_input(gradient, active, 0, grad_input=gradient)
