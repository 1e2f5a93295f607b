"""PyTorch's own composition of pipelines and data parallelism, on one device of four."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from piper.capture import annotate

STAGES, PARTS, WIDTH = 4, 8, 8
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Stages(nn.Module):
    """Four small stages, enough to lose a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(STAGES)
        )

    def forward(self, x: Tensor) -> Tensor:
        for k, stage in enumerate(self.stages):
            with annotate("PP", k):
                x = stage(x)
        return x


def half(output: Tensor, target: Tensor) -> Tensor:
    """A sum, halved: the two replicas' add up to the mean of their sums."""
    return (output - target).square().sum() / 2


def data(replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + replica)
    return tuple(torch.randn(2 * PARTS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def whole_batch() -> tuple[Tensor, Tensor]:
    both = [data(replica) for replica in range(2)]
    return torch.cat([x for x, _ in both]), torch.cat([y for _, y in both])


def plain_gradients() -> dict[str, Tensor]:
    model = Stages()
    x, y = whole_batch()
    half(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def peer(rank: int, schedule: str, wrap: str) -> tuple[int, float]:
    """The number of missing gradients, and the largest relative error of the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    warnings.filterwarnings("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    numbers = [pp, 3 - pp] if schedule in V_SHAPED else [pp, pp + 2]
    model = Stages()
    mine = [wrapped(copy.deepcopy(model.stages[k]), wrap, mesh["dp"]) for k in numbers]
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(stage, k, STAGES, torch.device("cpu"), group=group)
        for stage, k in zip(mine, numbers, strict=True)
    ]
    loss = lambda output, target: (output - target).square().sum()  # noqa: E731
    run = get_schedule_class(schedule)(
        stages, n_microbatches=PARTS, loss_fn=loss, scale_grads=False
    )
    x, y = data(dp)
    given = (x,) if 0 in numbers else ()
    run.step(*given, **({"target": y, "losses": []} if 3 in numbers else {}))
    found = errors(mine, numbers)
    dist.barrier()
    return found


def wrapped(stage: nn.Module, wrap: str, mesh: Any) -> nn.Module:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group())
    from torch.distributed.fsdp import fully_shard

    return fully_shard(stage, mesh=mesh, reshard_after_forward=True)


def errors(stages: list[nn.Module], numbers: list[int]) -> tuple[int, float]:
    reference, missing, worst = plain_gradients(), 0, 0.0
    for stage, k in zip(stages, numbers, strict=True):
        for name, parameter in stage.named_parameters():
            wanted = reference[f"stages.{k}.{name.removeprefix('module.')}"]
            if parameter.grad is None:
                missing += 1
                continue
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            worst = max(worst, float((grad - wanted).norm() / wanted.norm()))
    return missing, worst
