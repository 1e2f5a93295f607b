"""The model of bench/tensor_parallel.py: a Llama in stages, whose rotary tables are buffers.

Torch's context parallelism cuts the tables with the tokens, so they must not be computed inside.
Piper runs the same modules as its peers, and needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import piper
from piper.models.llama import Block, LlamaConfig, cross_entropy, rotary_tables, small_weights


class Part(nn.Module):
    """Some layers. The first part embeds, the last has the head."""

    def __init__(self, config: LlamaConfig, length: int, index: int, count: int) -> None:
        super().__init__()
        first, last = index == 0, index == count - 1
        self.embedding = nn.Embedding(config.vocab, config.dim) if first else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers // count))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocab, bias=False) if last else None
        cos, sin = rotary_tables(config, torch.zeros(1, length), torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Model(nn.Module):
    """All parts, each a region PP=0, PP=1, ..."""

    def __init__(self, config: LlamaConfig, length: int, parts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.parts = nn.ModuleList(Part(config, length, k, parts) for k in range(parts))
        self.apply(small_weights)

    @property
    def loss(self) -> Callable[..., Tensor]:
        return cross_entropy

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            with piper.annotate("PP"):
                x = part(x)
        return x
