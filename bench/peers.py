"""Torch's own data parallelism, as a careful user writes it: DDP, FSDP2, pipelining x FSDP2.

On a CPU, FSDP2 has no streams and blocks on every all-gather. With `ahead` it gathers
asynchronously and one layer ahead of use, which makes it a fair peer there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from models import Staged, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], float]
Data = tuple[Tensor, Tensor]
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SCHEDULES = {  # ours: (theirs, stages per rank)
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved-1f1b": ("Interleaved1F1B", 2),
}


def accumulating(
    model: nn.Module, data: Data, parts: int, entering: Callable[[bool], object] = lambda last: None
) -> Step:
    """Microbatch by microbatch, then the optimizer. `entering` gets whether it is the last one."""
    optimizer = ADAMW(model.parameters())
    chunks = list(zip(*(tensor.chunk(parts) for tensor in data), strict=True))

    def step() -> float:
        total = 0.0
        for k, (tokens, labels) in enumerate(chunks):
            with entering(k == parts - 1) or nullcontext():
                loss = cross_entropy(model(tokens), labels) / parts
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ddp(model: Staged, data: Data, parts: int, bucket_mb: float = 25.0) -> Step:
    """DDP that reduces gradients in the last backward only, in buckets (default: 25 MB)."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    return accumulating(wrapped, data, parts, lambda last: None if last else wrapped.no_sync())


def fsdp2(
    model: Staged, data: Data, parts: int, reshard: bool, each: bool, ahead: bool = True
) -> Step:
    """FSDP2 that reduces gradients for each microbatch (`each`), or keeps them until the last."""
    sharded(model.stages, init_device_mesh("cpu", (dist.get_world_size(),)), reshard, ahead)
    whole = fully_shard(model, reshard_after_forward=reshard)
    if ahead:
        whole._set_unshard_async_op(True)
        whole.set_modules_to_forward_prefetch([model.stages[0]])

    def entering(last: bool) -> None:
        whole.set_is_last_backward(last)
        whole.set_requires_gradient_sync(each or last)
        whole.set_reshard_after_backward(reshard or last)

    return accumulating(model, data, parts, entering)


def sharded(layers: Sequence[nn.Module], mesh: DeviceMesh, reshard: bool, ahead: bool) -> None:
    done = [fully_shard(layer, mesh=mesh, reshard_after_forward=reshard) for layer in layers]
    assert all(isinstance(layer, FSDPModule) for layer in done)
    if ahead:
        for layer in done:
            layer._set_unshard_async_op(True)
        for before, after in pairwise(done):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])


def pipelined(
    name: str, model: Staged, data: Data, parts: int, pp: int, reshard: bool, ahead: bool = True
) -> Step:
    """A pipeline of stages of `model`, several layers each, sharded over the replicas."""
    theirs, per_rank = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (dist.get_world_size() // pp, pp), mesh_dim_names=("dp", "pp"))
    rank, count = mesh["pp"].get_local_rank(), pp * per_rank
    ids = [rank + k * pp for k in range(per_rank)]
    mine = [model.stages[k] for k in ids]
    for module in mine:
        sharded(module.blocks, mesh["dp"], reshard, ahead)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
        if ahead:
            module._set_unshard_async_op(True)
            module.set_modules_to_forward_prefetch([module.blocks[0]])
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    stages = [
        PipelineStage(module, k, count, cpu, group=group)
        for module, k in zip(mine, ids, strict=True)
    ]
    kind = schedules.get_schedule_class(theirs)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, n_microbatches=parts, loss_fn=cross_entropy)
    optimizer = ADAMW([p for module in mine for p in module.parameters()])
    tokens, labels = data

    def step() -> float:
        losses: list[Tensor] = []
        target = {"target": labels, "losses": losses} if count - 1 in ids else {}
        schedule.step(*([tokens] if 0 in ids else []), **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")

    return step
