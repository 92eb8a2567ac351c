"""Mean losses by noise level where only the mean loss of a whole batch can be seen: by least squares from many of them."""

import numpy as np
import torch

from .timestep_log import one_hot_bins


class BatchLosses:
    """
    What is seen of a batch: how its images are spread over bins of timesteps, and its mean loss.

    With the mean loss `m` of each bin, that of a batch is expected to be `shares @ m`, so that the bins' means follow by
    least squares from more batches than bins. Only sums are kept: nothing is read off the device.
    """

    def __init__(self, starts: np.ndarray, device: torch.device):
        self.one_hot = one_hot_bins(starts).to(device)
        # Of shares, loss and 1, each with each; the last column holds the numbers of images.
        self.sums = torch.zeros(len(starts) + 1, len(starts) + 2, dtype=torch.float64, device=device)

    def add(self, timesteps: torch.Tensor, loss: torch.Tensor) -> None:
        """Adds a batch: timesteps of shape `(num_images,)`, and its mean loss, a scalar."""
        images = self.one_hot[timesteps].sum(0)
        seen = torch.cat([images / len(timesteps), loss.detach().double().reshape(1), images.new_ones(1)])
        self.sums[:, :-1] += torch.outer(seen, seen)
        self.sums[: len(images), -1] += images


def solve(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """
    Images, mean losses, and variances of these means: each float64 of shape `(bins,)`, NaN in bins without images.

    Args:
        sums (`np.ndarray`): Those of [`BatchLosses`], of all processes together.

    Returns: `None` if there are no more batches than bins with images, so that the means have no errors yet.
    """
    bins = len(sums) - 2
    normal, right, images = sums[:bins, :bins], sums[:bins, bins], sums[:bins, -1]
    found, num_batches = images > 0, sums[-1, -2]
    rank = np.linalg.matrix_rank(normal[np.ix_(found, found)], hermitian=True) if found.any() else 0
    if rank < found.sum() or num_batches <= rank:
        return None
    inverse = np.linalg.inv(normal[np.ix_(found, found)])
    solved = inverse @ right[found]
    squares = max(0.0, float(sums[bins, bins] - solved @ right[found]))
    means, variances = np.full(bins, np.nan), np.full(bins, np.nan)
    means[found], variances[found] = solved, np.diag(inverse) * squares / (num_batches - rank)
    return images, means, variances
