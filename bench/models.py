"""One model for Piper and its peers. Stages are modules, so that both cut it the same way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piper
from piper.models.llama import Block, LlamaConfig, cross_entropy, rotary_tables

__all__ = ["Staged", "batch", "cross_entropy"]


class Stage(nn.Module):
    """Some layers; the first stage embeds, the last one has the head."""

    def __init__(self, config: LlamaConfig, index: int, stages: int) -> None:
        super().__init__()
        self.config = config
        layers = config.layers // stages
        self.embedding = nn.Embedding(config.vocab, config.dim) if index == 0 else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        last = index == stages - 1
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rotary_tables(self.config, x[..., 0] if x.dim() == 3 else x, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


class Staged(nn.Module):
    """The whole model, annotated."""

    def __init__(self, config: LlamaConfig, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(Stage(config, k, stages) for k in range(stages))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for stage in self.stages:
            with piper.annotate("PP"):
                x = stage(x)
        return x


def batch(config: LlamaConfig, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randint(0, config.vocab, (rows, length + 1), generator=generator)
    return cuts[:, :-1].contiguous(), cuts[:, 1:].contiguous()
