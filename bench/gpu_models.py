"""The models of bench/gpu.py: a Qwen3, dense or with experts, cut into stages that are modules.

Piper and its peers run the same modules. A stage is a region of Piper and a stage of a peer.
Weights do not depend on where the model is cut, so all contenders start with the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import piper
from piper.models.llama import cross_entropy, rotary_tables, small_weights
from piper.models.qwen3 import Block
from piper.models.qwen3_moe import MoeBlock, Qwen3MoeConfig, moe_loss

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """The size of a model and its batch; `rows` are those of a microbatch."""

    dim: int
    layers: int
    heads: int
    length: int
    rows: int
    microbatches: int
    vocab: int
    expert_hidden: int
    experts: int = 8

    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(
            vocab=self.vocab, dim=self.dim, layers=self.layers, heads=self.heads,
            kv_heads=max(1, self.heads // 2), head_dim=self.dim // self.heads,
            experts=self.experts, expert_hidden=self.expert_hidden,
        )  # fmt: skip

    def batch(self, replica: int = 0, parts: int = 0) -> Data:
        """The batch of a replica, on the host, as from a data loader."""
        generator = torch.Generator().manual_seed(1 + replica)
        shape = (self.rows * (parts or self.microbatches), self.length + 1)
        cuts = torch.randint(0, self.vocab, shape, generator=generator)
        return cuts[:, :-1].contiguous(), cuts[:, 1:].contiguous()


SIZES = {
    # For a CPU, only to see that everything runs.
    "tiny": Size(32, 8, 4, 16, 1, 8, 64, 32),
    # For a CPU behind slowed links: messages and compute take about as long.
    "links": Size(256, 4, 8, 128, 2, 8, 1024, 32),
    "small": Size(512, 8, 8, 256, 2, 8, 8192, 512),
    "medium": Size(1024, 8, 16, 512, 2, 8, 8192, 1024),
    "large": Size(2048, 8, 16, 1024, 2, 8, 8192, 2048),
}


class Cut(nn.Module):
    """Some layers. The first cut embeds, the last has the head. Auxiliary losses travel along."""

    def __init__(self, config: Qwen3MoeConfig, moe: bool, index: int, cuts: int) -> None:
        super().__init__()
        self.config, self.moe, self.layered = config, moe, False
        self.embedding = nn.Embedding(config.vocab, config.dim) if index == 0 else None
        kind: Callable[[Any], nn.Module] = MoeBlock if moe else Block
        self.blocks = nn.ModuleList(kind(config) for _ in range(config.layers // cuts))
        last = index == cuts - 1
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor, side: Tensor | float = 0.0) -> Any:
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rotary_tables(self.config, x[..., 0], x.dtype)
        for block in self.blocks:
            if self.layered:
                with piper.annotate("L"):
                    x, side = self.through(block, x, cos, sin, side)
            else:
                x, side = self.through(block, x, cos, sin, side)
        if self.head is None or self.norm is None:
            return (x, side) if self.moe else x
        logits = self.head(self.norm(x))
        return (logits, side / self.config.layers) if self.moe else logits

    def through(self, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, side: Any) -> Any:
        return block(x, cos, sin, side) if self.moe else (block(x, cos, sin), side)


class Whole(nn.Module):
    """All cuts, each a region PP=0, PP=1, ... On request, layers are regions, too."""

    def __init__(self, config: Qwen3MoeConfig, moe: bool, cuts: int, layered: bool) -> None:
        super().__init__()
        if config.layers % cuts:
            raise ValueError(f"{config.layers} layers cannot be cut in {cuts} equal parts")
        self.cuts = nn.ModuleList(Cut(config, moe, k, cuts) for k in range(cuts))
        self.moe = moe
        self.apply(small_weights)
        for cut in self.cuts:
            cut.layered = layered

    @property
    def loss(self) -> Callable[..., Tensor]:
        return moe_loss if self.moe else cross_entropy

    def forward(self, tokens: Tensor) -> Any:
        given: tuple[Any, ...] = (tokens,)
        for cut in self.cuts:
            with piper.annotate("PP"):
                found = cut(*given)
            given = found if isinstance(found, tuple) else (found,)
        return given if self.moe else given[0]


class Shelf:
    """A cache of models, because making one takes seconds."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.models: dict[Any, Whole] = {}

    def get(self, size: Size, cuts: int, moe: bool = False, layered: bool = False) -> Whole:
        """A model on the host; its weights are drawn where that is fast. Do not change it."""
        key = (size.config(), cuts, moe, layered)
        if key not in self.models:
            torch.manual_seed(0)
            with self.device:
                model = Whole(size.config(), moe, cuts, layered)
            self.models[key] = model.to("cpu", self.dtype)
        return self.models[key]


def half_as_deep(size: Size, ways: int = 2) -> Size:
    """What one of the pipeline ranks computes."""
    return replace(size, layers=size.layers // ways)
