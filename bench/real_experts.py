"""Expert parallelism of DeepSpeed and Megatron-Core beside Piper's, on the same weights.

Their layers take the place of the mixtures in the same model: the same experts, two for each token,
none dropped, no side loss. DeepSpeed has two: `deepspeed.moe`, whose experts run one after the
other on padded rows, and the newer AutoEP, which multiplies all experts at once. Megatron-Core's
experts need Transformer Engine to run at once. Without it they run one after the other, so there is
also a contender whose layer, router and all-to-alls are Megatron's and whose experts are ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import real_deepspeed
import torch
from gpu_arena import Contender
from gpu_models import Cut, Data, Size, Whole
from real_arena import RealArena
from real_megatron import Way, megatron
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.models.grouped import grouped_mm
from piper.models.llama import cross_entropy
from piper.models.qwen3_moe import Experts, Mixture

AUTO = {  # how DeepSpeed's AutoEP finds the mixtures
    "enabled": True, "moe_layer_pattern": r".*\.feed_forward\.layer", "router_pattern": "gate",
    "expert_pattern": "experts", "expert_w1": "gate_up", "expert_w2": "down", "expert_w3": None,
    "has_shared_experts": False, "score_func": "softmax", "score_apply": "post",
    "route_norm": True, "expert_activation": "swiglu",
}  # fmt: skip


def logits_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross entropy alone: each system has another side loss."""
    return cross_entropy(output[0] if isinstance(output, tuple) else output, labels)


class Beside(nn.Module):
    """A peer's layer in the place of a mixture."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, side: Any) -> tuple[Tensor, Any]:
        found = self.layer(x)
        return found[0] if isinstance(found, tuple) else found, side


class LogitsOnly(nn.Module):
    """A cut that takes and returns one tensor."""

    def __init__(self, cut: nn.Module) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x)[0]


def replaced(cut: Cut, layer_of: Callable[[Mixture], nn.Module]) -> nn.Module:
    for block in cut.blocks:
        block.feed_forward = Beside(layer_of(block.feed_forward))
    return LogitsOnly(cut)


# DeepSpeed


class SwiGLU(nn.Module):
    """One expert, as a user of deepspeed.moe writes it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


def deepspeed_layer(arena: RealArena, mixture: Mixture) -> nn.Module:
    """Its MoE with the weights of the mixture, whose experts the ranks divide."""
    from deepspeed.moe.layer import MoE

    config, dtype = mixture.config, mixture.experts.down.dtype
    layer = MoE(
        config.dim, SwiGLU(config.dim, config.expert_hidden), config.experts, arena.world,
        k=config.chosen, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
        min_capacity=0,
    ).to(dtype)  # fmt: skip
    inner = layer.deepspeed_moe
    with torch.no_grad():
        inner.gate.wg.weight.copy_(mixture.router.weigh.weight)
        here = shares(mixture.experts, arena.rank, arena.world)
        for expert, (gate_up, down) in zip(inner.experts.deepspeed_experts, here, strict=True):
            expert.gate_up.weight.copy_(gate_up.T)
            expert.down.weight.copy_(down.T)
    return layer


def shares(experts: Experts, rank: int, ways: int) -> list[tuple[Tensor, Tensor]]:
    """The weights of each expert of a rank."""
    parts = [weight.detach().chunk(ways)[rank] for weight in (experts.gate_up, experts.down)]
    return list(zip(*parts, strict=True))


class Named(nn.Module):
    """A mixture by the names that AutoEP looks for. It is never called."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.gate, self.experts = mixture.router.weigh, mixture.experts


def deepspeed(arena: RealArena, model: Whole, data: Data, parts: int, auto: bool) -> Contender:
    """All ranks are replicas and divide the experts."""
    engines = real_deepspeed.deepspeed(arena)
    layer_of = Named if auto else partial(deepspeed_layer, arena)
    mine = replaced(copy.deepcopy(model.cuts[0]), layer_of).to(arena.device)
    config = real_deepspeed.settings(
        arena, parts, data[0].shape[0] // parts, 0, arena.world, master=False
    )
    if auto:
        chosen = model.cuts[0].config.chosen
        config["expert_parallel"] = {**AUTO, "autoep_size": arena.world, "top_k": chosen}
    engine, *_ = engines.initialize(
        model=mine, optimizer=arena.adamw(mine.parameters()), config=config
    )
    return real_deepspeed.stepping(arena, engine, logits_loss, data, parts)


# Megatron-Core


class TheirExperts(nn.Module):
    """Our experts, by the interface of Megatron's: scores are applied inside, as it does."""

    def __init__(self, count: int, config: Any, pg_collection: Any = None, name: Any = None):
        super().__init__()
        dim, hidden = config.hidden_size, config.moe_ffn_hidden_size
        dtype = config.params_dtype
        self.gate_up = nn.Parameter(torch.empty(count, dim, 2 * hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, dim, dtype=dtype))
        for weight in self.parameters():
            weight.allreduce = False  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, counts: Tensor, scores: Tensor) -> tuple[Tensor, None]:
        counts = counts.to(rows.device, torch.int64)
        gate, up = grouped_mm(rows, self.gate_up, counts).chunk(2, dim=-1)
        weighted = (functional.silu(gate) * up * scores.unsqueeze(-1)).to(rows.dtype)
        return grouped_mm(weighted, self.down, counts), None


def one_by_one(count: int, config: Any, pg_collection: Any = None, name: Any = None) -> nn.Module:
    """Its experts without Transformer Engine."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(count, config, linears, pg_collection=pg_collection)


def megatron_layer(config: Any, grouped: bool, mixture: Mixture) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    layer = MoELayer(config, MoESubmodules(experts=TheirExperts if grouped else one_by_one))
    layer.set_layer_number(1)
    rank = parallel_state.get_expert_model_parallel_rank()
    here = shares(mixture.experts, rank, config.expert_model_parallel_size)
    with torch.no_grad():
        layer.router.weight.copy_(mixture.router.weigh.weight)
        if grouped:
            for into, values in zip(
                layer.experts.parameters(), zip(*here, strict=True), strict=True
            ):
                into.copy_(torch.stack(values))
            return layer
        for expert, (gate_up, down) in zip(layer.experts.local_experts, here, strict=True):
            expert.linear_fc1.weight.copy_(gate_up.T)
            expert.linear_fc2.weight.copy_(down.T)
    return layer


def way_of(size: Size, pp: int, virtual: int, ep: int, grouped: bool) -> Way:
    """No token is dropped, and no side loss is added."""
    config = size.config()
    more = {
        "num_moe_experts": config.experts, "moe_router_topk": config.chosen,
        "moe_ffn_hidden_size": config.expert_hidden, "ffn_hidden_size": config.expert_hidden,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True, "activation_func": functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": True, "perform_initialization": False,
    }  # fmt: skip

    def made(cut: nn.Module, options: Any) -> nn.Module:
        return replaced(cut, partial(megatron_layer, options, grouped))

    return Way(pp, virtual, ep=ep, made=made, more=more)


# Contests


def pipers(
    arena: RealArena, size: Size, data: Data, parts: int, pp: int, names: dict[str, int]
) -> dict[str, Callable[[], Contender]]:
    """Schedules of Piper, each with so many stages on a rank."""
    if arena.chosen.peers_only:
        return {}
    ways, found = arena.world // pp, {}
    for name, per_rank in names.items():
        strategy = piper.strategies.BUILDERS[name](pp=pp, microbatches=parts, dp=ways, ep=ways)
        model = arena.shelf.get(size, pp * per_rank, moe=True)
        found[f"piper {name}"] = partial(arena.piper, model, strategy, data, loss=logits_loss)
    return found


def replicas(arena: RealArena, size: Size, parts: int) -> None:
    """No pipeline: all ranks are replicas and divide the experts."""
    data, model = size.batch(arena.rank, parts), arena.shelf.get(size, 1, moe=True)
    makers: dict[str, Any] = pipers(arena, size, data, parts, 1, {"1f1b": 1, "dualpipev": 2})
    for name, auto in (("deepspeed.moe", False), ("deepspeed AutoEP", True)):
        makers[name] = partial(deepspeed, arena, model, data, parts, auto)
    for name, grouped in (("megatron", False), ("megatron, our experts", True)):
        way = way_of(size, 1, 1, arena.world, grouped)
        makers[name] = partial(megatron, arena, model, size, parts, way, logits_loss)
    arena.versus(f"ep={arena.world}", makers)


def pipelines(arena: RealArena, size: Size, parts: int) -> None:
    """Two stages, whose replicas divide the experts."""
    pp, ways = 2, arena.world // 2
    data = size.batch(arena.rank // pp, parts)
    for name, virtual in (("1f1b", 1), ("interleaved-1f1b", 2)):
        makers: dict[str, Any] = pipers(
            arena, size, data, parts, pp, {name: virtual, "dualpipev": 2}
        )
        model = arena.shelf.get(size, pp * virtual, moe=True)
        for peer, grouped in (("megatron", False), ("megatron, our experts", True)):
            way = way_of(size, pp, virtual, ways, grouped)
            makers[peer] = partial(megatron, arena, model, size, parts, way, logits_loss)
        arena.versus(f"pp={pp} ep={ways} {name}", makers)
