"""A Qwen3-like language model whose layers are annotated as pipeline stages."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate
from piper.models.llama import FeedForward, LlamaConfig, rotary_tables, rotate, small_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Sizes of a Qwen3: those of a Llama, and a free width of heads."""

    head_dim: int = 8
    rope_base: float = 1_000_000.0
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Causal self-attention with rotary positions and a norm on each head's queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.keys * config.head_dim
        self.query = nn.Linear(config.dim, queries, bias=False)
        self.key = nn.Linear(config.dim, keys, bias=False)
        self.value = nn.Linear(config.dim, keys, bias=False)
        self.out = nn.Linear(queries, config.dim, bias=False)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(
            rotate(self.query_norm(self.heads(self.query(x))), cos, sin),
            rotate(self.key_norm(self.heads(self.key(x))), cos, sin),
            self.heads(self.value(x)),
            is_causal=True,
            enable_gqa=self.config.keys != self.config.heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = self.make_feed_forward(config)

    def make_feed_forward(self, config: Qwen3Config) -> nn.Module:
        return FeedForward(config)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x), cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attend(x, cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The common part of all Qwen3 models: embedding, layers and head, each in a stage."""

    def __init__(self, config: Qwen3Config, stages: int = 1) -> None:
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


class Qwen3(Decoder):
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
