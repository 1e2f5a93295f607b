"""Small models that are divided in tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.models.llama import Llama, LlamaConfig

BATCH, TOKENS, VOCABULARY = 3, 8, 64


def llama(stages: int = 1, **more) -> Llama:
    sizes = {"layers": 2, "heads": 4, "dim": 16, "vocab": VOCABULARY, "hidden": 32}
    return Llama(LlamaConfig(**{**sizes, **more}), stages)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Gpt(nn.Module):
    """LayerNorm, biases, fused q/k/v, dropout, GELU, learned positions, a tied head."""

    def __init__(self, dim: int = 16, heads: int = 4, p: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(VOCABULARY, dim), nn.Embedding(TOKENS, dim)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(dim) for _ in range(3))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(p)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        q, k, v = map(self.split, self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return self.norm(x) @ self.words.weight.t()

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Unruly(nn.Module):
    """Operators without a rule in the middle, and a padding token."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        h = functional.silu(self.up(x)).renorm(2, 2, 9.0)
        x = x + self.down(h).kthvalue(5, -1, keepdim=True).values
        return functional.log_softmax(self.head(x), -1)


def nll(output: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(output.flatten(0, 1), labels.flatten())


def drawn(model: nn.Module) -> nn.Module:
    """In float64, with weights that are all different and not small."""
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of which are ignored."""
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS))
    tokens[0, 1], labels[0, :3] = 3, -100
    return tokens, labels
