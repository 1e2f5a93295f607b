"""Megatron-Core beside Piper: its schedules, its DistributedDataParallel and its optimizer.

The optimizer is torch's AdamW, because neither Transformer Engine nor apex is there. Its
distributed optimizer always keeps float32 weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import Size, Whole
from real_without_gpu import as_on_a_gpu
from torch import Tensor, nn

AT_HAND: list[tuple[int, int, int]] = []  # what its process groups are made for


@dataclass(frozen=True)
class Way:
    """What it is asked for; `sync` waits for the GPU after every message, its default.

    `made` changes a cut into what it trains, and `more` are options of its configuration.
    """

    pp: int
    virtual: int = 1
    sharded: bool = False
    sync: bool = True
    ep: int = 1
    made: Callable[[nn.Module, Any], nn.Module] = lambda cut, config: cut
    more: dict[str, Any] = field(default_factory=dict)


class Chunk(nn.Module):
    """A cut, with what its schedules ask of a model chunk."""

    def __init__(self, cut: nn.Module, config: Any, first: bool, last: bool, virtual: int | None):
        from megatron.core.enums import ModelType

        super().__init__()
        self.cut, self.config, self.input = cut, config, None
        self.pre_process, self.post_process, self.vp_stage = first, last, virtual
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, found: Any) -> None:
        self.input = found[0] if isinstance(found, list) else found

    def forward(self, tokens: Tensor) -> Any:
        return self.cut(tokens if self.pre_process else self.input)


def groups(way: Way) -> Any:
    """Its process groups, which are global."""
    from megatron.core import parallel_state

    wanted = (way.pp, way.virtual, way.ep)
    if [wanted] != AT_HAND:
        if AT_HAND:
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=way.pp,
            virtual_pipeline_model_parallel_size=way.virtual if way.virtual > 1 else None,
            expert_model_parallel_size=way.ep,
        )
        AT_HAND[:] = [wanted]
    return parallel_state


def transformer(arena: Arena, size: Size, way: Way) -> Any:
    """The part of its configuration that the schedules read."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    several = way.virtual > 1
    config = TransformerConfig(
        num_layers=size.layers, hidden_size=size.dim, num_attention_heads=size.heads,
        pipeline_model_parallel_size=way.pp,
        virtual_pipeline_model_parallel_size=way.virtual if several else None,
        pipeline_dtype=arena.dtype, params_dtype=arena.dtype, autocast_dtype=arena.dtype,
        bf16=arena.dtype == torch.bfloat16, batch_p2p_comm=not several, batch_p2p_sync=way.sync,
        overlap_p2p_comm=several, deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False, use_cpu_initialization=True,
        expert_model_parallel_size=way.ep, **way.more,
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    return config


def chunks(arena: Arena, model: Whole, config: Any, way: Way, here: int) -> list[nn.Module]:
    """The model chunks of this rank, wrapped in its DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    replicated = arena.world > way.pp
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=replicated,
        use_distributed_optimizer=way.sharded, overlap_param_gather=way.sharded,
    )  # fmt: skip
    count, found = way.pp * way.virtual, []
    for k in range(way.virtual):
        stage = here + way.pp * k
        cut = way.made(copy.deepcopy(model.cuts[stage]), config).to(arena.device)
        chunk = k if way.virtual > 1 else None
        one = Chunk(cut, config, stage == 0, stage == count - 1, chunk)
        found.append(DistributedDataParallel(config, options, one, disable_bucketing=k > 0))
    if replicated:
        config.no_sync_func = only([one.no_sync for one in found])
        if way.sharded:
            config.param_sync_func = only([one.start_param_sync for one in found])
    return found


def only(values: list[Any]) -> Any:
    """Megatron takes one value, or a list of several."""
    return values[0] if len(values) == 1 else values


def optimizer_of(arena: Arena, wrapped: list[nn.Module], way: Way) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=3e-4, weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999,
        adam_eps=1e-8, bf16=arena.dtype == torch.bfloat16 and way.sharded,
        params_dtype=arena.dtype, use_distributed_optimizer=way.sharded, clip_grad=0.0,
        overlap_param_gather=way.sharded,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, wrapped)
    for group in optimizer.param_groups:  # torch's AdamW decays all parameters alike
        group["weight_decay"], group["lr"] = 0.01, 3e-4
    return optimizer


@as_on_a_gpu
def megatron(
    arena: Arena, model: Whole, size: Size, parts: int, way: Way, loss_fn: Any = None
) -> Contender:
    """Its forward_backward_func, and the optimizer step that its training loop takes after it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state, config = groups(way), transformer(arena, size, way)
    wrapped = chunks(arena, model, config, way, state.get_pipeline_model_parallel_rank())
    optimizer = optimizer_of(arena, wrapped, way)
    tokens, labels = size.batch(state.get_data_parallel_rank(), parts)
    run, loss_fn = get_forward_backward_func(), loss_fn or model.loss

    def forward_step(batches: Iterator[tuple[Tensor, Tensor]], chunk: nn.Module) -> Any:
        given, wanted = next(batches)

        def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value = loss_fn(out, wanted)
            return value, {"loss": value.detach().clone()}  # it divides the value in place

        return chunk(given), loss

    def step() -> Any:
        cuts = [t.to(arena.device, non_blocking=True).chunk(parts) for t in (tokens, labels)]
        for one in wrapped:
            one.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=only([zip(*cuts, strict=True) for _ in wrapped]),
            model=only(wrapped), num_microbatches=parts, forward_only=False,
            seq_length=tokens.shape[0] // parts, micro_batch_size=tokens.shape[1],
        )  # fmt: skip
        optimizer.step()
        return torch.stack([one["loss"] for one in losses]).mean() if losses else float("nan")

    return Contender(step)
