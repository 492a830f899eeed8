"""A deep residual network that learns which half of its input is larger."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import threed


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Halves:
    """Item i is a function of i: every rank has the same ones."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(32, generator=torch.Generator().manual_seed(self.first + index))
        return x, (x[:16].sum() > x[16:].sum()).long()


MODEL = threed.Layers(
    [threed.Spec(nn.Linear, 32, 64), *(threed.Spec(Block, 64, dropout=0.1) for _ in range(6)),
     threed.Spec(nn.Linear, 64, 2)],
    F.cross_entropy, (Halves(4096), Halves(256, first=10**6)))

if __name__ == "__main__":
    config = threed.initialize(MODEL, config={
        "parallel": {"pp": 2, "dp": 2, "schedule": "zb-h1"}, "zero": {"stage": 2},
        "train": {"steps": 100, "global_batch_size": 32, "micro_batch_size": 4, "eval_every": 50},
        "run": {"dir": "runs/residual"}}, overrides=sys.argv[1:])
    print(threed.show(config))
    threed.train(config)
