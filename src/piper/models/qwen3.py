"""A Qwen3-like language model whose layers are annotated as pipeline stages."""

from dataclasses import dataclass

from torch import Tensor, nn

from piper.models import llama
from piper.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Sizes of a Qwen3: those of a Llama, and a free width of heads."""

    head_dim: int = 8
    rope_base: float = 1_000_000.0
    norm_eps: float = 1e-6


class Attention(llama.Attention):
    """That of a Llama, with a norm on each head's queries and keys."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().queries_and_keys(x)
        return self.query_norm(query), self.key_norm(key)


class Block(llama.Block):
    """A layer of a Llama, with the attention of a Qwen3."""

    def make_attention(self, config: LlamaConfig) -> nn.Module:
        return Attention(config)


class Qwen3(Llama):
    """A Llama with other layers. Its regions are the same."""

    def make_block(self, layer: int) -> nn.Module:
        return Block(self.config)
