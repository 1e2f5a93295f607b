"""Piper's peers on GPUs (and CPUs): torch's own parallelism, as a careful user writes it.

Every step takes its batch from the host, as Piper's does, and reads no loss in the middle. On a
GPU, FSDP2 prefetches by itself; on a CPU it must be told to.

In torch 2.11 to 2.13, FSDP2 with reshard silently loses gradients under pipelining schedules that
split backwards (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV). It is never used here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gpu_arena import Arena, Contender
from gpu_models import Data, Whole
from pipelining import PEERS as SCHEDULES  # ours: (theirs, stages per rank, V-shaped)
from pipelining import stage_ids
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

CUT_BACKWARDS = ("interleaved-zb", "zbv", "dualpipev")  # no reshard with these: see above
PLAIN = MixedPrecisionPolicy()  # the types of the model
Entering = Callable[[bool], Any]


def plain(arena: Arena, model: Whole, data: Data, parts: int, **options: Any) -> Contender:
    """One device, eager or through torch.compile with its options."""
    mine = copy.deepcopy(model).to(arena.device)
    if options.get("mode"):  # a CUDA graph would overwrite gradients in its memory
        for parameter in mine.parameters():
            parameter.grad = torch.zeros_like(parameter)
    run = torch.compile(mine, **options) if options else mine
    keep = "mode" in options
    return Contender(accumulating(arena, run, model.loss, data, parts, keep=keep))


def accumulating(
    arena: Arena,
    model: Any,
    loss_fn: Callable[..., Tensor],
    data: Data,
    parts: int,
    entering: Entering = lambda last: None,
    keep: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], Tensor]:
    """Microbatch by microbatch, then the optimizer. `entering` gets whether it is the last one.

    With `keep`, gradients stay in memory and are set to zero.
    """
    optimizer = optimizer or arena.adamw(model.parameters())

    def step() -> Tensor:
        given = [tensor.to(arena.device, non_blocking=True).chunk(parts) for tensor in data]
        losses = []
        for k, (tokens, labels) in enumerate(zip(*given, strict=True)):
            torch.compiler.cudagraph_mark_step_begin()
            with entering(k == parts - 1) or nullcontext():
                loss = loss_fn(model(tokens), labels) / parts
                loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)
        return torch.stack(losses).sum()

    return step


def ddp(arena: Arena, model: Whole, data: Data, parts: int) -> Contender:
    """DDP that reduces gradients in the last backward only."""
    mine = copy.deepcopy(model).to(arena.device)
    wrapped = DistributedDataParallel(mine, gradient_as_bucket_view=True)
    return Contender(
        accumulating(
            arena, wrapped, model.loss, data, parts,
            lambda last: None if last else wrapped.no_sync(),
        )
    )  # fmt: skip


def fsdp2(
    arena: Arena,
    model: Whole,
    data: Data,
    parts: int,
    reshard: bool,
    each: bool,
    policy: MixedPrecisionPolicy = PLAIN,
) -> Contender:
    """FSDP2 that reduces gradients for each microbatch (`each`), or keeps them until the last."""
    mine = copy.deepcopy(model).to(arena.device)
    layers = [block for cut in mine.cuts for block in cut.blocks]
    shard(arena, mine, layers, arena.mesh(arena.world), reshard, policy)
    parameters = list(mine.parameters())
    optimizer = arena.adamw(parameters)

    def entering(last: bool) -> None:
        mine.set_is_last_backward(last)
        mine.set_requires_gradient_sync(each or last)
        mine.set_reshard_after_backward(reshard or last)

    step = accumulating(arena, mine, model.loss, data, parts, entering, optimizer=optimizer)
    return Contender(step, parameters=parameters, optimizers=[optimizer])


def shard(
    arena: Arena,
    whole: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    reshard: bool,
    policy: MixedPrecisionPolicy = PLAIN,
) -> None:
    """Shard layer by layer, and the rest as one more unit."""
    sharded = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard)
    inside = replace(policy, output_dtype=None)  # layers read each other's results
    done: list[Any] = [sharded(one, mp_policy=inside) for one in layers]
    root: Any = sharded(whole, mp_policy=policy)
    if not arena.on_gpu:
        for unit in (*done, root):
            unit._set_unshard_async_op(True)
        root.set_modules_to_forward_prefetch([done[0]])
        for before, after in pairwise(done):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])


def pipelined(
    arena: Arena,
    name: str,
    model: Whole,
    data: Data,
    parts: int,
    pp: int,
    reshard: bool | None = None,
    checkpointed: bool = False,
) -> Contender:
    """torch.distributed.pipelining; with `reshard` given, FSDP2 over the replicas of each stage.

    `checkpointed`: each layer is recomputed in its backward.
    """
    assert not (reshard and name in CUT_BACKWARDS), "this would lose gradients without a word"
    theirs, per_rank, v_shaped = SCHEDULES[name]
    mesh, count = arena.mesh(arena.world // pp, pp), pp * per_rank
    ids = stage_ids(mesh["pp"].get_local_rank(), pp, per_rank, v_shaped)
    mine: list[Any] = [copy.deepcopy(model.cuts[k]).to(arena.device) for k in ids]
    for module in mine:
        if checkpointed:
            module.blocks = nn.ModuleList(map(checkpoint_wrapper, module.blocks))
        if reshard is not None:
            shard(arena, module, list(module.blocks), mesh["dp"], reshard)
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(module, k, count, arena.device, group=group)
        for module, k in zip(mine, ids, strict=True)
    ]
    schedule = scheduled(theirs, stages, parts, model.loss)
    parameters = [p for module in mine for p in module.parameters()]
    optimizer = arena.adamw(parameters)

    def step() -> Tensor | float:
        tokens, labels = (tensor.to(arena.device, non_blocking=True) for tensor in data)
        losses: list[Tensor] = []
        target = {"target": labels, "losses": losses} if count - 1 in ids else {}
        schedule.step(*([tokens] if 0 in ids else []), **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else float("nan")

    return Contender(step, parameters=parameters)


def scheduled(
    theirs: str, stages: list[PipelineStage], parts: int, loss_fn: Callable[..., Tensor]
) -> Any:
    kind = schedules.get_schedule_class(theirs)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, n_microbatches=parts, loss_fn=loss_fn)


def replica(arena: Arena, pp: int) -> int:
    """The replica of this rank: replica r of pipeline rank s is rank r * pp + s."""
    return arena.rank // pp
