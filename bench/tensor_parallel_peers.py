"""Torch's tensor and context parallelism, as torchtitan writes it: plans of `parallelize_module`.

Norms are sequence-parallel, the vocabulary is cut, and the loss is computed on cut logits. Without
`sequence`, activations between the products are whole, as in the first Megatron.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import Data
from gpu_peers import scheduled
from tensor_parallel_models import Model, Part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def block_plan(sequence: bool) -> dict[str, Any]:
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=between),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        whole = Replicate()
        plan |= {
            "attention_norm": SequenceParallel(),
            "feed_forward_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(whole, None, None)
            ),
            "feed_forward": PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(whole,)
            ),
        }
    return plan


def divide(part: Part, mesh: DeviceMesh, sequence: bool) -> None:
    """Megatron's plan, for the layers of one part."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {}
    if part.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if part.head is not None:
        cut = {"output_layouts": Shard(-1), "use_local_output": False}
        plan["head"] = ColwiseParallel(input_layouts=between, **cut)
        if sequence:
            plan["norm"] = SequenceParallel()
    for block in part.blocks:
        parallelize_module(block, mesh, block_plan(sequence))
    parallelize_module(part, mesh, plan)


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Optimizers cannot mix DTensors and tensors in a group."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return [{"params": found} for found in kinds if found]


def step_of(
    arena: Arena,
    model: Callable[..., Tensor],
    parameters: list[nn.Parameter],
    data: Data,
    parts: int,
    loss: Callable[..., Tensor],
    entering: Callable[[bool, list[Tensor]], AbstractContextManager[Any]],
) -> Contender:
    """Microbatch by microbatch, then the optimizer."""
    optimizer = arena.adamw(groups(parameters))

    def step() -> Tensor:
        given = [tensor.to(arena.device, non_blocking=True).chunk(parts) for tensor in data]
        losses = []
        for k, chunk in enumerate(zip(*given, strict=True)):
            tokens, labels = (one.clone() for one in chunk)
            with entering(k == parts - 1, [tokens, labels]):
                found = loss(model(tokens), labels) / parts
                found.backward()
            losses.append(whole(found.detach()))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return Contender(step, parameters=parameters)


def whole(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def tensor_parallel(
    arena: Arena, model: Model, data: Data, parts: int, tp: int, sequence: bool = True,
    compiled: bool = False, asynchronous: bool = False,
) -> Contender:  # fmt: skip
    """All ranks divide weights; or with FSDP2 over the replicas of each group."""
    mesh = arena.mesh(arena.world // tp, tp)
    mine = copy.deepcopy(model).to(arena.device)
    for part in mine.parts:
        divide(part, mesh["pp"], sequence)
    if compiled or asynchronous:
        compile_blocks(mine, mesh["pp"], asynchronous)
    if arena.world > tp:
        for block in blocks(mine):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(mine, mesh=mesh["dp"])

    def entering(last: bool, tensors: list[Tensor]) -> AbstractContextManager[Any]:
        if arena.world > tp:
            mine.set_is_last_backward(last)
            mine.set_requires_gradient_sync(last)
        return loss_parallel()

    return step_of(arena, mine, list(mine.parameters()), data, parts, model.loss, entering)


def compile_blocks(model: Model, mesh: DeviceMesh, asynchronous: bool) -> None:
    """Each layer by itself, as torchtitan does. `asynchronous`: products in parts, whose messages
    go through symmetric memory, which needs a GPU for each rank."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = asynchronous
    if asynchronous:
        enable_symm_mem_for_group(mesh.get_group().group_name)
    for block in blocks(model):
        block.compile(fullgraph=True)


def blocks(model: Model) -> Iterator[nn.Module]:
    for part in model.parts:
        yield from part.blocks


def pipelined(arena: Arena, model: Model, data: Data, parts: int, pp: int, tp: int) -> Contender:
    """torch.distributed.pipelining of stages whose weights are divided: 1F1B."""
    mesh = arena.mesh(pp, tp)
    index = mesh["dp"].get_local_rank()  # the first axis
    part = copy.deepcopy(model.parts[index]).to(arena.device)
    divide(part, mesh["pp"], sequence=True)
    stage = PipelineStage(part, index, pp, arena.device, group=mesh["dp"].get_group())
    schedule = scheduled("1F1B", [stage], parts, model.loss)
    parameters = list(part.parameters())
    optimizer = arena.adamw(groups(parameters))

    def step() -> Tensor | float:
        tokens, labels = (tensor.to(arena.device, non_blocking=True) for tensor in data)
        losses: list[Tensor] = []
        target = {"target": labels, "losses": losses} if index == pp - 1 else {}
        with loss_parallel():
            schedule.step(*([tokens] if index == 0 else []), **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([whole(one) for one in losses]).mean() if losses else float("nan")

    return Contender(step, parameters=parameters)


def context_parallel(arena: Arena, model: Model, data: Data, parts: int) -> Contender:
    """Torch's context parallelism (ring attention), and DDP, which adds up the gradients."""
    from torch.distributed.tensor.experimental import context_parallel as divided

    mesh = arena.mesh(arena.world)
    mine = copy.deepcopy(model).to(arena.device)
    tables = [table for part in mine.parts for table in (part.cos, part.sin)]
    wrapped = DistributedDataParallel(mine, gradient_as_bucket_view=True)

    def entering(last: bool, tensors: list[Tensor]) -> AbstractContextManager[Any]:
        cut = divided(mesh, buffers=[*tensors, *tables], buffer_seq_dims=[1, 1, *[0] * len(tables)])
        return Both(cut, nullcontext() if last else wrapped.no_sync())

    return step_of(arena, wrapped, list(mine.parameters()), data, parts, model.loss, entering)


class Both(AbstractContextManager[Any]):
    """Two context managers as one."""

    def __init__(self, *inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        for one in self.inner:
            one.__enter__()

    def __exit__(self, *error: Any) -> None:
        for one in reversed(self.inner):
            one.__exit__(*error)
