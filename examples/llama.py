"""A Llama of Hugging Face transformers, taken apart into layers: its embedding, its decoder layers, its norm
and head. It learns to continue sequences in which each number is the one before plus a step.

    python examples/llama.py                                   8 processes, dp 4 x pp 2, on this machine
    python examples/llama.py parallel.dp=2 parallel.pp=4 zero.stage=3 parallel.schedule=zb-h1

What a decoder layer needs beside the hidden states, cosines and sines of the rotary positions, travels with
them in a dictionary. The embedding's matrix is the head's, too. (To train Llama itself, use `model.family:
llama`: threed's own layers are cut over tp, and priced.)
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

import threed

VOCAB, LENGTH = 64, 32


def config_of(layers: int = 4, hidden: int = 64) -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden,
                       num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                       max_position_embeddings=LENGTH, attn_implementation="sdpa")


class Embedding(nn.Module):
    """Tokens [B, S] -> {hidden [B, S, D], cos and sin [1, S, E]}."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.table.weight, std=config.initializer_range)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(tokens)
        cos, sin = self.rotary(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        return {"hidden": hidden, "cos": cos, "sin": sin}


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig, index: int):
        super().__init__()
        self.layer = LlamaDecoderLayer(config, index)

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = self.layer(x["hidden"], position_embeddings=(x["cos"], x["sin"]))
        return {**x, "hidden": out[0] if isinstance(out, tuple) else out}


class Head(nn.Module):
    """{hidden} -> logits [B, S, VOCAB]."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.output(self.norm(x["hidden"]))


class Steps:
    """Sequences by formula: start, start + step, start + 2 step, ... modulo VOCAB."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, step = index * 7919 % VOCAB, 1 + index * 104729 % 12
        numbers = (start + step * torch.arange(LENGTH + 1)) % VOCAB
        return numbers[:-1], numbers[1:]


def layers(config: LlamaConfig, tied: bool = True) -> list[threed.Spec]:
    first, last = ({"word": "table.weight"}, {"word": "output.weight"}) if tied else (None, None)
    decoders = [threed.Spec(Decoder, config, index) for index in range(config.num_hidden_layers)]
    return [threed.Spec(Embedding, config, tied=first), *decoders, threed.Spec(Head, config, tied=last)]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over tokens, and their number: each token of a global batch weighs alike, wherever it is."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


LLAMA = threed.Layers(layers(config_of()), loss, Steps(4096))
CONFIG = {
    "parallel": {"dp": 4, "pp": 2}, "zero": {"stage": 1}, "optimizer": {"lr": 3e-3, "warmup_steps": 10},
    "train": {"steps": 60, "global_batch_size": 64, "micro_batch_size": 4},
    "monitor": {"console_every": 10}, "run": {"dir": "runs/llama"},
}

if __name__ == "__main__":
    run = threed.train(threed.initialize(LLAMA, config=CONFIG, overrides=sys.argv[1:]))
    print(f"loss {run.metrics[0]['train/loss']:.3f} -> {run.metrics[-1]['train/loss']:.3f}")
