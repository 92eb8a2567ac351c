"""Mean losses by noise level from mean losses of whole batches, by least squares."""

import numpy as np
import torch

from .timestep_log import one_hot_bins


class BatchLosses:
    """
    Sums over batches of the shares of their images in bins of timesteps and of their mean losses.

    With the mean loss `m` of each bin, that of a batch is expected to be `shares @ m`, so the bins' means follow by least
    squares from more batches than bins. The sums need no device synchronization.
    """

    def __init__(self, starts: np.ndarray, device: torch.device):
        self.one_hot = one_hot_bins(starts).to(device)
        bins = len(starts) - 1
        self._pairs = tuple(each.to(device) for each in torch.triu_indices(bins + 1, bins + 1))
        num_pairs = len(self._pairs[0])
        # Products of each two of the shares and the loss: first the products of these products, then their sum. The last
        # column holds the numbers of images and, at its end, of batches.
        self.sums = torch.zeros(num_pairs, num_pairs + 2, dtype=torch.float64, device=device)

    def add(self, timesteps: torch.Tensor, losses: torch.Tensor) -> None:
        """Adds batches of one size: timesteps of shape `(num_batches, num_images)`, mean losses `(num_batches,)`."""
        images = self.one_hot[timesteps].sum(1)
        seen = torch.cat([images / timesteps.shape[1], losses.detach().double()[:, None]], dim=1)
        products = seen[:, self._pairs[0]] * seen[:, self._pairs[1]]
        self.sums[:, :-2] += products.T @ products
        self.sums[:, -2] += products.sum(0)
        self.sums[: images.shape[1], -1] += images.sum(0)
        self.sums[-1, -1] += len(losses)


def solve(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """
    Numbers of images, mean losses, and variances of these means: float64 of shape `(bins,)`, NaN in bins without images.
    `None` unless there are more batches than bins with images. `sums` are those of [`BatchLosses`] over all processes.

    The variances are the sandwich estimate of H. White (Econometrica 48, 1980) from the squared error of each batch, times
    `num_batches / (num_batches - bins)`, as the spread of losses may differ between noise levels and batches. For batches of
    one image, each bin's variance is that of its own losses.
    """
    size = int((8 * len(sums) + 1) ** 0.5 - 1) // 2  # number of shares and the loss, which have `len(sums)` pairs
    first, second = np.triu_indices(size)

    def matrix(products: np.ndarray) -> np.ndarray:
        whole = np.zeros((size, size))
        whole[first, second] = whole[second, first] = products
        return whole

    images, num_batches, normal = sums[: size - 1, -1], sums[-1, -1], matrix(sums[:, -2])
    found = np.flatnonzero(images > 0)
    shares = np.ix_(found, found)
    rank = np.linalg.matrix_rank(normal[shares], hermitian=True) if len(found) else 0
    if rank < len(found) or num_batches <= rank:
        return None
    inverse = np.linalg.inv(normal[shares])
    error = np.zeros(size)  # of a batch, from its shares and its loss
    error[found], error[-1] = -(inverse @ normal[found, -1]), 1
    squared = np.where(first == second, 1, 2) * error[first] * error[second]
    spread = matrix(sums[:, :-2] @ squared)[shares]
    means, variances = np.full(size - 1, np.nan), np.full(size - 1, np.nan)
    means[found] = -error[found]
    variances[found] = np.maximum(np.diag(inverse @ spread @ inverse), 0) * num_batches / (num_batches - rank)
    return images, means, variances
