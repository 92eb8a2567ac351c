"""A plain training loop on points, in the shape of the study's template.

A DataLoader, one operation after the other, a loss that is read at every update.
"""

import math

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

BATCH, TIMESTEPS = 256, 100


class PlainDenoiser(torch.nn.Module):
    """The same network, with an embedding for each coordinate."""

    def __init__(self):
        super().__init__()
        self.input, self.output = torch.nn.Linear(384, 256), torch.nn.Linear(256, 2)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))

    @staticmethod
    def embed(values, scale):
        """Sines and cosines."""
        frequencies = torch.exp(torch.arange(64, device=values.device) * (-math.log(10000.0) / 63))
        angles = (values * scale)[:, None] * frequencies[None, :]
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)

    def forward(self, points, timesteps):
        """The predicted noise."""
        parts = [self.embed(points[:, 0], 25.0), self.embed(points[:, 1], 25.0), self.embed(timesteps, 1.0)]
        hidden = self.input(torch.cat(parts, dim=-1))
        for block in self.blocks:
            hidden = hidden + block(F.relu(hidden))
        return self.output(F.relu(hidden))


def plain_updates(points, num_updates, device="cpu"):
    """One update for each `next()`."""
    torch.manual_seed(0)
    model = PlainDenoiser().to(device)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_updates)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points), batch_size=BATCH, shuffle=True)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMESTEPS, device=device), dim=0)
    update, losses = 0, []
    bar = tqdm(total=num_updates, disable=True)
    while True:
        for (batch,) in loader:
            batch = batch.to(device)
            noise = torch.randn(batch.shape, device=device)
            timesteps = torch.randint(0, TIMESTEPS, (len(batch),), device=device).long()
            signal, strength = alphas[timesteps].sqrt()[:, None], (1 - alphas[timesteps]).sqrt()[:, None]
            loss = F.mse_loss(model(signal * batch + strength * noise, timesteps), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if update % 10 == 0:
                for kept, parameter in zip(average, model.parameters(), strict=True):
                    kept.lerp_(parameter.detach(), 0.005)
            schedule.step()
            losses.append(loss.detach().item())
            bar.update(1)
            bar.set_postfix(loss=loss.detach().item())
            update += 1
            yield
