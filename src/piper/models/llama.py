"""A Llama-like language model whose layers are annotated as pipeline stages."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama. The defaults make a toy that trains in milliseconds on a CPU."""

    vocab: int = 128
    dim: int = 32
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads
    hidden: int | None = None  # None: 8/3 of dim, rounded up to a multiple of 8
    tied: bool = False  # the head uses the embedding's weights
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        return self.hidden or -(-self.dim // 3) * 8

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads


def rotary_tables(config: LlamaConfig, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position. Not a buffer, so a model on meta has nothing to restore."""
    halves = torch.arange(0, config.head_dim, 2, device=tokens.device, dtype=torch.float32)
    positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_base ** (-halves / config.head_dim)).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.keys * config.head_dim
        self.query = nn.Linear(config.dim, queries, bias=False)
        self.key = nn.Linear(config.dim, keys, bias=False)
        self.value = nn.Linear(config.dim, keys, bias=False)
        self.out = nn.Linear(queries, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key = self.queries_and_keys(x)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            self.heads(self.value(x)),
            is_causal=True,
            enable_gqa=self.config.keys != self.config.heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.query(x)), self.heads(self.key(x))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = self.make_attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = self.make_feed_forward(config)

    def make_attention(self, config: LlamaConfig) -> nn.Module:
        return Attention(config)

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        return FeedForward(config)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attend(x, cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The common part of all models here: embedding, layers and head, each in a stage."""

    def __init__(self, config: LlamaConfig, stages: int = 1) -> None:
        super().__init__()
        if not 1 <= stages <= config.layers:
            raise ValueError(f"layers={config.layers} cannot be cut into stages={stages}")
        self.config, self.stages = config, stages
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(small_weights)

    def make_block(self, layer: int) -> nn.Module:
        return Block(self.config)

    def stage(self, layer: int) -> int:
        return layer * self.stages // self.config.layers

    def rotary(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(self.config, tokens, self.embedding.weight.dtype)


class Llama(Decoder):
    """Tokens [batch, time] -> logits [batch, time, vocab], in `stages` regions PP=0, PP=1, ...

    The embedding is in the first stage, the head in the last. Layers are spread evenly.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotary(tokens)
        with annotate("PP", 0):
            x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            with annotate("PP", self.stage(layer)):
                x = block(x, cos, sin)
        with annotate("PP", self.stages - 1):
            return self.head(self.norm(x))


def small_weights(module: nn.Module) -> None:
    """The usual small initial weights, so that a tied head starts with reasonable logits."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens, in float32 for every dtype of the model."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
