"""A vision transformer (Dosovitskiy et al. 2021) on images that are made, not downloaded: which of eight
shapes and colours is on a noisy ground?

    python examples/vit.py                                     8 processes, dp 4 x pp 2, on this machine
    python examples/vit.py parallel.dp=2 parallel.pp=4 zero.stage=3 parallel.schedule=zb-h1
    torchrun --standalone --nproc-per-node=8 examples/vit.py
    threed show examples/vit.yaml                              the same model, by the command line

The toy's mesh is dp 2 x tp 2 x pp 2. Layers of one's own are not cut over tp, so here dp is 4.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import threed

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 64, 4, 6, 8


class Patches(nn.Module):
    """Image [B, 3, SIZE, SIZE] -> tokens [B, 1 + patches, WIDTH], the first of which is the class's."""

    def __init__(self, width: int, patch: int = PATCH):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (SIZE // patch) ** 2, width) * 0.02)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.cut(image).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.position


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        inner = F.gelu(self.up(self.norms[1](x)))
        return x + F.dropout(self.down(inner), self.dropout, self.training)


class Head(nn.Module):
    """Tokens -> logits of the classes [B, CLASSES]."""

    def __init__(self, width: int, classes: int = CLASSES):
        super().__init__()
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(x[:, 0]))


class Shapes:
    """Images by formula: number `index` is always the same one."""

    def __init__(self, count: int, first: int = 0):
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        kind = (self.first + index) % CLASSES
        at, radius = torch.rand(2, generator=draw) * 12 + 10, 5 + 4 * torch.rand((), generator=draw)
        y, x = torch.meshgrid(torch.arange(SIZE) - at[0], torch.arange(SIZE) - at[1], indexing="ij")
        distance = [x.hypot(y), x.abs() + y.abs(), torch.maximum(x.abs(), y.abs()), x.abs().minimum(y.abs())]
        inside = distance[kind % 4] < (radius if kind % 4 < 3 else 2)
        image = 0.3 * torch.rand(3, SIZE, SIZE, generator=draw)
        image[kind // 4, inside] += 0.7  # red or green
        return image, torch.tensor(kind)


def layers(depth: int = DEPTH, width: int = WIDTH, dropout: float = 0.0) -> list[threed.Spec]:
    blocks = [threed.Spec(Block, width, HEADS, dropout) for _ in range(depth)]
    return [threed.Spec(Patches, width), *blocks, threed.Spec(Head, width)]


VIT = threed.Layers(layers(), F.cross_entropy, (Shapes(4096), Shapes(256, first=10**6)))
CONFIG = {
    "parallel": {"dp": 4, "pp": 2}, "zero": {"stage": 1}, "optimizer": {"lr": 1e-3, "warmup_steps": 10},
    "train": {"steps": 60, "global_batch_size": 64, "micro_batch_size": 4, "eval_every": 20},
    "monitor": {"console_every": 10}, "run": {"dir": "runs/vit"},
}

if __name__ == "__main__":
    run = threed.train(threed.initialize(VIT, config=CONFIG, overrides=sys.argv[1:]))
    print(f"loss {run.metrics[0]['train/loss']:.3f} -> {run.metrics[-1]['train/loss']:.3f}")
