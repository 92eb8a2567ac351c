"""Many [`MLPDenoiser`]s as one computation: weights `(members, out, in)`, forward and backward passes written out."""

from typing import Any

import torch

from .products import multiply
from .rows import Rows


class StackedForward:
    """Predictions of networks with the architecture of `model`, whose parameters are the rows of a matrix."""

    def __init__(self, model: Any):
        self.model, self.rows = model, Rows(list(model.parameters()))

    def layers(self, matrix: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weights and biases `(members, ...)` of each layer, as views of a matrix of parameters."""
        views = self.rows.split(matrix)
        return views[::2], views[1::2]

    @torch.no_grad()
    def predict(self, matrix: torch.Tensor, points: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """
        Predictions `(rows, number, dimension)` at timesteps `(rows, number)`, by the operations of `MLPDenoiser.forward` in
        their order.
        """
        embedding = self.model.embed(points.flatten(0, 1), timesteps.flatten()).to(matrix.dtype)
        values, hidden = embedding.unflatten(0, points.shape[:2]), torch.zeros(())
        weights, biases = self.layers(matrix)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            after = values.new_empty(*points.shape[:2], weight.shape[1])
            after.copy_(bias[:, None].expand_as(after))
            multiply("forward", values, weight, after, add=True)
            hidden = after if index in (0, len(weights) - 1) else hidden.add_(after)
            values = hidden.relu()
        return hidden


class StackedMLP(StackedForward):
    """
    Networks of one architecture with their weights in common tensors.

    The parameters of each network become views of its row in `values`, and their gradients views of its row in `grads`, so
    that an optimizer of a network changes the stack. No operation mixes networks: where `hidden_size` is a multiple of 4,
    no bit of a network depends on the others, and elsewhere only rounding does (MKL's depends on addresses modulo 16). This
    holds in a single thread, as in a worker; several threads divide products by their number.

    The models have one configuration, device and dtype, and stay usable by themselves. `batch` is the number of points of
    each in an update.
    """

    def __init__(self, models: list[Any], batch: int):
        super().__init__(models[0])
        self.models, self.batch = models, batch
        parameters = [list(model.parameters()) for model in models]
        self.values = self.rows.gather(parameters)
        self.grads = torch.zeros_like(self.values)
        for own, value, grad in zip(parameters, self.values, self.grads, strict=True):
            for parameter, its_value, its_grad in zip(own, self.rows.split(value), self.rows.split(grad), strict=True):
                parameter.data, parameter.grad = its_value, its_grad
        self.weights, self.biases = self.layers(self.values)
        self.weight_grads, self.bias_grads = self.layers(self.grads)
        like, size = self.weights[0], (len(models), batch, models[0].config.hidden_size)
        self._hidden = [like.new_empty(size) for _ in self.weights[1:]]
        self._active = [like.new_empty(size) for _ in self.weights[1:]]
        self._gradient, self._through = like.new_empty(size), like.new_empty(size)
        self._output = like.new_empty(len(models), batch, models[0].config.dimension)
        self._waves = like.new_empty(len(models), batch, self.weights[0].shape[2], dtype=torch.float32)
        self._embedding = self._waves.to(like.dtype)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients `(members, ...)` in the order of the parameters of a network."""
        return self.rows.split(self.grads)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, gradients and the buffers of a pass."""
        buffers = (*self._hidden, *self._active, self._gradient, self._through, self._output, self._embedding)
        return sum(tensor.nbytes for tensor in (self.values, self.grads, *buffers))

    def forward(self, points: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Predictions `(members, batch, dimension)`; valid until the next call."""
        angles = self.models[0].angles(points.flatten(0, 1), timesteps.flatten())
        halves = self._waves.view(*angles.shape[:2], 2, -1)
        torch.sin(angles, out=halves[:, :, 0])
        torch.cos(angles, out=halves[:, :, 1])
        self._embedding = self._waves.to(self.values.dtype)
        hidden, active = self._hidden, self._active
        hidden[0].copy_(self.biases[0][:, None].expand_as(hidden[0]))
        multiply("forward", self._embedding, self.weights[0], hidden[0], add=True)
        for index, after in enumerate(hidden[1:], start=1):
            torch.clamp_min(hidden[index - 1], 0, out=active[index - 1])
            torch.add(hidden[index - 1], self.biases[index][:, None], out=after)
            multiply("forward", active[index - 1], self.weights[index], after, add=True)
        torch.clamp_min(hidden[-1], 0, out=active[-1])
        self._output.copy_(self.biases[-1][:, None].expand_as(self._output))
        multiply("forward", active[-1], self.weights[-1], self._output, add=True)
        return self._output

    def backward(self, gradient: torch.Tensor) -> None:
        """Computes the gradients of all parameters from the gradient of the output, `(members, batch, dimension)`."""
        through, total = self._through, self._gradient
        self._layer_gradients(-1, gradient, self._active[-1])
        multiply("input_gradient", gradient, self.weights[-1], total)
        _where_positive(total, self._active[-1])
        for index in range(len(self.weights) - 2, 0, -1):
            self._layer_gradients(index, total, self._active[index - 1])
            multiply("input_gradient", total, self.weights[index], through)
            total.add_(_where_positive(through, self._active[index - 1]))
        self._layer_gradients(0, total, self._embedding)

    def _layer_gradients(self, index: int, gradient: torch.Tensor, values: torch.Tensor) -> None:
        multiply("weight_gradient", gradient, values, self.weight_grads[index])
        torch.sum(gradient, 1, out=self.bias_grads[index])

    def clip(self, max_norms: torch.Tensor) -> torch.Tensor:
        """
        Clips the gradient of each network as `torch.nn.utils.clip_grad_norm_` does, and returns the norms before clipping.

        `max_norms` is `(members,)`, infinite for networks without clipping.
        """
        norms = torch.linalg.vector_norm(self.grads, dim=1)
        factors = (max_norms / (norms + 1e-6)).clamp(max=1.0)
        self.grads.mul_(factors[:, None])
        return norms


def _where_positive(gradient: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The gradient behind a ReLU whose output was `active`, in place."""
    return torch.ops.aten.threshold_backward.grad_input(gradient, active, 0, grad_input=gradient)
