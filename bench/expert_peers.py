"""Expert parallelism under torch.distributed.pipelining, as a careful user writes it.

Rows travel by all-to-all inside the module, to and from the experts of this device. Each kind of
communication has its own process group. All other gradients are averaged over the replicas at the
end of the step, in one message.

Two things are silently wrong in torch 2.13 under a schedule that splits backwards (ZBVZeroBubble,
InterleavedZeroBubble, DualPipeV): DDP around a stage skips the all-reduce, and FSDP2 with reshard
loses gradients. So gradients are reduced by hand here, after `schedule.step`.

The schedules never overlap an all-to-all with another microbatch. `OVERLAP_F_B` of DualPipeV runs
its two halves one after the other, unless the user registers a function that runs both.
`overlapped` is such a function. It uses private APIs of torch and follows TorchTitan's idea: the
two halves are threads, only one of them computes at a time, and a thread that waits for rows lets
the other run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

Step = Callable[[], float]
Data = tuple[Tensor, Tensor]
SCHEDULES = {  # theirs: (ours, stages per rank, V-shaped)
    "GPipe": ("gpipe", 1, False),
    "1F1B": ("1f1b", 1, False),
    "Interleaved1F1B": ("interleaved-1f1b", 2, False),
    "InterleavedZeroBubble": ("interleaved-zb", 2, False),
    "ZBVZeroBubble": ("zbv", 2, True),
    "DualPipeV": ("dualpipev", 2, True),
    "DualPipeV by hand": ("dualpipev", 2, True),  # with `overlapped`
}


@dataclass
class Groups:
    """Replica r of pipeline rank s is rank r * pp + s."""

    pp: int
    ways: int
    pipe: Any = field(init=False)
    out: Any = field(init=False)  # rows of forwards
    back: Any = field(init=False)  # row gradients: two threads must not share a group
    dense: Any = field(init=False)

    def __post_init__(self) -> None:
        rank = dist.get_rank()
        pipes = [[r * self.pp + s for s in range(self.pp)] for r in range(self.ways)]
        teams = [list(team) for team in zip(*pipes, strict=True)]
        self.pipe = mine(pipes, rank)
        self.out = mine(teams, rank)
        self.back = mine(teams, rank)
        self.dense = mine(teams, rank)


def mine(teams: Sequence[list[int]], rank: int) -> Any:
    """Every rank creates all groups, in the same order."""
    made = [dist.new_group(team) for team in teams]
    return next(group for team, group in zip(teams, made, strict=True) if rank in team)


@dataclass
class Sent:
    """What this device has sent to experts on other devices."""

    bytes: int = 0
    messages: int = 0


SENT = Sent()


def travel(rows: Tensor, to: list[int], come: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty(sum(come), *rows.shape[1:])
    SENT.bytes += (rows.shape[0] - to[dist.get_rank(group)]) * rows[:1].nbytes
    SENT.messages += 1
    work = dist.all_to_all_single(arrived, rows.contiguous(), come, to, group, async_op=True)
    with TURNS.left():
        work.wait()
    return arrived


class Journey(torch.autograd.Function):
    """An all-to-all of rows; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], come: list[int], groups: Groups) -> Tensor:
        ctx.way = come, to, groups.back
        return travel(rows, to, come, groups.out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return travel(grad, *ctx.way), None, None, None


class ParallelExperts(nn.Module):
    """The experts of this device, in place of all experts."""

    def __init__(self, experts: nn.Module, groups: Groups) -> None:
        super().__init__()
        self.groups, self.ways = groups, groups.ways
        for name, parameter in list(experts.named_parameters()):
            share = parameter.detach().chunk(self.ways)[dist.get_rank(groups.out)]
            setattr(experts, name, nn.Parameter(share.clone()))
        self.local = experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        sent = counts.view(self.ways, -1)
        got = travel(sent, [1] * self.ways, [1] * self.ways, self.groups.out)
        given, taken = torch.stack([sent, got]).tolist()  # one synchronisation with the GPU
        to, come = list(map(sum, given)), list(map(sum, taken))
        rows = Journey.apply(rows, to, come, self.groups)
        rows = self.local(resorted(rows, taken), got.sum(0))
        back = list(map(list, zip(*taken, strict=True)))
        return Journey.apply(resorted(rows, back), come, to, self.groups)


def resorted(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Transpose the order of parts: from row by row of the size matrix to column by column."""
    high, wide = len(sizes), len(sizes[0])
    parts = rows.split([size for row in sizes for size in row])
    return torch.cat([parts[r * wide + c] for c in range(wide) for r in range(high)])


class Turns:
    """Threads that take turns: only one computes at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self.lock:
            self.thread.inside = True
            yield
            self.thread.inside = False

    @contextmanager
    def left(self) -> Iterator[None]:
        """Let the other thread compute while this one waits. Does nothing without threads."""
        if not getattr(self.thread, "inside", False):
            yield
            return
        self.lock.release()
        yield
        self.lock.acquire()


TURNS = Turns()


def overlapped(action: Any, context: Any) -> None:
    """Both halves of an OVERLAP_F_B in two threads, each as `_step_microbatches` runs it."""
    schedule = context.schedule_ref
    ahead, behind = action.sub_actions
    stages = {stage.stage_index: stage for stage in schedule._stages}

    def forward() -> None:
        index, part = ahead.stage_index, ahead.microbatch_index
        stage = stages[index]
        if not stage.is_first and index - 1 not in stages:
            schedules._wait_batch_p2p(schedule.fwd_recv_ops.pop((index, part)))
        with TURNS.taken():
            output = stage.forward_one_chunk(
                part, context.arg_mbs[part], context.kwarg_mbs[part], save_forward_output=False
            )
            schedule._maybe_compute_loss(stage, output, context.target_mbs, part, None)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, part)

    def backward() -> None:
        index, part = behind.stage_index, behind.microbatch_index
        stage = stages[index]
        if not stage.is_last and index + 1 not in stages:
            schedules._wait_batch_p2p(schedule.bwd_recv_ops.pop((index, part)))
        schedule.backward_counter[index] += 1
        last = schedule.backward_counter[index] == schedule._n_microbatches
        with TURNS.taken():
            loss = schedule._maybe_get_loss(stage, part)
            stage.backward_one_chunk(part, loss=loss, full_backward=True, last_backward=last)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(part), part)

    other = HELPER.submit(backward)
    forward()
    other.result()


HELPER = ThreadPoolExecutor(1)


def with_experts_shared(stages: Sequence[nn.Module], groups: Groups) -> list[nn.Module]:
    """Replace every module called `experts`, and return the replacements."""
    found = [
        (owner, experts)
        for stage in stages
        for owner in list(stage.modules())
        if isinstance(experts := getattr(owner, "experts", None), nn.Module)
    ]
    for owner, experts in found:
        owner.experts = ParallelExperts(experts, groups)
    return [owner.experts for owner, _ in found]


def stage_ids(rank: int, ranks: int, per_rank: int, v_shaped: bool) -> list[int]:
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + k * ranks for k in range(per_rank)]


def peer(
    name: str,
    cut: Callable[[int], Sequence[nn.Module]],
    loss_fn: Callable[..., Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    data: Data,
    parts: int,
    groups: Groups,
    device: torch.device | str = "cpu",
) -> Step:
    """One training step; `cut` makes the given number of stages."""
    _, per_rank, v_shaped = SCHEDULES[name]
    rank, count = dist.get_rank(groups.pipe), groups.pp * per_rank
    ids = stage_ids(rank, groups.pp, per_rank, v_shaped)
    every = cut(count)
    modules = [every[k] for k in ids]
    shared = with_experts_shared(modules, groups)
    own = [p for experts in shared for p in experts.parameters()]
    known = set(own)
    dense = [p for m in modules for p in m.parameters() if p not in known]
    stages = [
        PipelineStage(module, k, count, torch.device(device), group=groups.pipe)
        for module, k in zip(modules, ids, strict=True)
    ]
    kind = schedules.get_schedule_class(name.partition(" ")[0])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, n_microbatches=parts, loss_fn=loss_fn)
    if name.endswith("by hand"):
        schedule.register_custom_function(schedules.OVERLAP_F_B, overlapped)
    updates = optimizer([*dense, *own])
    tokens, labels = data

    def step() -> float:
        losses: list[Tensor] = []
        target = {"target": labels, "losses": losses} if count - 1 in ids else {}
        schedule.step(*([tokens] if 0 in ids else []), **target, return_outputs=False)
        averaged(dense, own, groups)
        updates.step()
        updates.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")

    return step


def averaged(dense: Sequence[Tensor], own: Sequence[Tensor], groups: Groups) -> None:
    """Average over replicas. Gradients of experts are complete: all replicas sent their rows."""
    flat = torch.cat([p.grad.flatten() for p in dense])
    work = dist.all_reduce(flat, group=groups.dense, async_op=True)
    torch._foreach_div_([p.grad for p in own], groups.ways)
    work.wait()
    flat /= groups.ways
    sizes = [p.numel() for p in dense]
    for p, grad in zip(dense, flat.split(sizes), strict=True):
        p.grad.copy_(grad.view_as(p))
