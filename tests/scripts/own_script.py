"""A script of somebody's own: a straight line, learned under a schedule by name."""

import argparse

import torch
from diffusers.optimization import get_scheduler

UPDATES = 50

parser = argparse.ArgumentParser()
parser.add_argument("--lr_scheduler", default="cosine")
name = parser.parse_args().lr_scheduler

torch.manual_seed(0)
x = torch.linspace(-1, 1, 32)[:, None]
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
scheduler = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=UPDATES)
for _ in range(UPDATES):
    loss = (model(x) - 2 * x - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
print(f"loss {loss.item():.1e}, learning rate {scheduler.get_last_lr()[0]:.1e}")
assert loss < 0.05
