"""A Qwen3-like language model with mixtures of experts: stages, and expert regions in them."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate
from piper.models.grouped import combine, grouped_mm, sort_by_expert
from piper.models.llama import Decoder, FeedForward, LlamaConfig, cross_entropy
from piper.models.qwen3 import Block, Qwen3Config

Side: TypeAlias = (
    Tensor | float
)  # side losses so far [batch]; 0.0 before the first layer that has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Sizes of a Qwen3 with experts. `hidden` is the width of its dense layers, if any."""

    experts: int = 4
    chosen: int = 2  # experts per token
    expert_hidden: int = 32
    normalise: bool = True  # the scores of a token's experts add up to one
    shared: int = 0  # experts for every token, in addition to the chosen ones
    dense_layers: int = 0  # layers without experts, at the beginning

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers


class Experts(nn.Module):
    """The SwiGLUs of all experts. Every parameter has the experts as its first dimension."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        experts, dim, hidden = config.experts, config.dim, config.expert_hidden
        self.gate_up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, and the number of rows of each expert."""
        gate, up = grouped_mm(rows, self.gate_up, counts).chunk(2, dim=-1)
        return grouped_mm(functional.silu(gate) * up, self.down, counts)


class Router(nn.Module):
    """Chooses the experts of a token, and their weights."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weigh = nn.Linear(config.dim, config.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, time, dim] -> scores and experts [batch, time, chosen]; all probabilities."""
        logits = self.weigh(x)
        wide = torch.promote_types(logits.dtype, torch.float32)  # bfloat16 would make ties
        probabilities = logits.softmax(-1, dtype=wide)
        score, expert = probabilities.topk(self.config.chosen)
        if self.config.normalise:
            score = score / score.sum(-1, keepdim=True)
        return score.to(x.dtype), expert, probabilities


class Mixture(nn.Module):
    """A feed-forward of many experts, few per token. Only the experts are in the EP region."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)
        if config.shared:
            hidden = config.shared * config.expert_hidden
            self.shared = FeedForward(replace(config, hidden=hidden))

    def forward(self, x: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        """x [batch, time, dim] -> what to add to x; side losses [batch] -> with this layer's.

        The side loss is added before the experts run, so that its inputs are already free by then.
        """
        score, expert, probabilities = self.router(x)
        often = per_sequence(expert, self.config.experts)
        side = side + balance(often, probabilities, self.config.chosen)
        rows, order, inverse = sort_by_expert(x.flatten(0, 1), expert.flatten(0, 1))
        counts = often.sum(0)
        with annotate("EP"):
            rows = self.experts(rows, counts)
        mixed = combine(rows, order, inverse, score.flatten(0, 1)).view_as(x)
        return mixed + self.shared(x) if self.config.shared else mixed, side


def per_sequence(expert: Tensor, experts: int) -> Tensor:
    """How often each sequence chose each expert: [batch, time, chosen] -> [batch, experts]."""
    expert = expert.flatten(1)
    none = expert.new_zeros(expert.shape[0], experts)
    return none.scatter_add(1, expert, torch.ones_like(expert))


def balance(often: Tensor, probabilities: Tensor, chosen: int) -> Tensor:
    """DeepSeek-V3's sequence-wise balance loss [batch]: 1 if all experts are used equally.

    For each sequence, it is the sum of f P over experts. f is how often the sequence chose the
    expert, relative to equal use (no gradient). P is the expert's mean probability. Each row of the
    batch has its own loss, so the mean over rows does not depend on how the batch is split into
    microbatches or over replicas. A balance over the whole batch would.
    """
    time, experts = probabilities.shape[1:]
    return (often * (experts / (chosen * time)) * probabilities.mean(1)).sum(-1)


class MoeBlock(Block):
    """One layer whose feed-forward is a mixture of experts."""

    def make_feed_forward(self, config: LlamaConfig) -> nn.Module:
        assert isinstance(config, Qwen3MoeConfig)
        return Mixture(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, side: Side = 0.0
    ) -> tuple[Tensor, Tensor]:
        x = self.attend(x, cos, sin)
        mixed, side = self.feed_forward(self.feed_forward_norm(x), side)
        return x + mixed, side


class Qwen3Moe(Decoder):
    """Tokens [batch, time] -> logits [batch, time, vocab] and side losses [batch].

    Layers are in `stages` regions PP=0, PP=1, ..., as in Qwen3. The experts of each layer are their
    own region EP=0, EP=1, ... inside it, which reads only the sorted rows and the counts. The side
    loss is the mean over the layers with experts. It goes from stage to stage as a running sum, so
    there is one value to send instead of one per layer.
    """

    config: Qwen3MoeConfig

    def __init__(self, config: Qwen3MoeConfig, stages: int = 1) -> None:
        if not 0 <= config.dense_layers < config.layers:
            raise ValueError(
                f"dense_layers={config.dense_layers} does not fit layers={config.layers}"
            )
        super().__init__(config, stages)

    def make_block(self, layer: int) -> nn.Module:
        dense = layer < self.config.dense_layers
        return Block(self.config) if dense else MoeBlock(self.config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(tokens)
        side: Side = 0.0
        with annotate("PP", 0):
            x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            with annotate("PP", self.stage(layer)):
                if layer < self.config.dense_layers:
                    x = block(x, cos, sin)
                else:
                    x, side = block(x, cos, sin, side)
        with annotate("PP", self.stages - 1):
            return self.head(self.norm(x)), side / self.config.moe_layers


def moe_loss(output: tuple[Tensor, Tensor], labels: Tensor, weight: float = 0.01) -> Tensor:
    """Cross entropy plus `weight` times the side loss. Change it with functools.partial."""
    logits, side = output
    return cross_entropy(logits, labels) + weight * side.mean()


PRESETS = {
    # For tests: a step takes milliseconds on a CPU.
    "tiny": Qwen3MoeConfig(vocab=64, dim=16, heads=2, kv_heads=1, expert_hidden=16),
    # For demonstrations: 7 million parameters, and enough experts to spread over devices.
    "demo": Qwen3MoeConfig(
        vocab=1024, dim=128, layers=8, heads=4, kv_heads=2, head_dim=32,
        experts=8, expert_hidden=256,
    ),
    "1B": Qwen3MoeConfig(
        vocab=32_768, dim=1024, layers=16, heads=16, kv_heads=8, head_dim=128,
        expert_hidden=4096,
    ),
    "9B": Qwen3MoeConfig(
        vocab=32_768, dim=2048, layers=24, heads=16, kv_heads=8, head_dim=128,
        experts=8, expert_hidden=7168,
    ),
    # As wide, deep and sparse as DeepSeek-V3. Its attention is grouped-query attention with 128
    # heads, not the original's multi-head latent attention, and its router is a softmax.
    "DeepSeek-V3": Qwen3MoeConfig(
        vocab=129_280, dim=7168, layers=61, heads=128, kv_heads=8, head_dim=128, hidden=18_432,
        experts=256, chosen=8, expert_hidden=2048, shared=1, dense_layers=3,
    ),
}  # fmt: skip
