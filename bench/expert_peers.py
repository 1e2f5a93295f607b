"""Expert parallelism under torch.distributed.pipelining, as a careful user writes it.

Rows travel by all-to-all inside the module, around the experts that this device has; each kind of
communication has a process group of its own. Gradients of everything else are averaged over the
replicas at the end of the step, in one message.

What not to do in torch 2.13, since it is silently wrong: DDP around a stage under a schedule that
cuts backwards (ZBVZeroBubble, InterleavedZeroBubble, DualPipeV) skips the all-reduce, and FSDP2
with reshard loses gradients there. So gradients are reduced by hand here, after `schedule.step`.

The schedules never overlap an all-to-all with another microbatch: `OVERLAP_F_B` of DualPipeV runs
its halves one after the other, unless the user writes a function that runs both and registers it.
`overlapped` is such a function, by torch's private interfaces and after TorchTitan's idea: the two
halves are threads of which one computes at a time, and who waits for rows lets the other go on.
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
    out: Any = field(init=False)  # rows in forwards
    back: Any = field(init=False)  # gradients of rows: two threads must not share a group
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
    """All ranks make all groups, in one order."""
    made = [dist.new_group(team) for team in teams]
    return next(group for team, group in zip(teams, made, strict=True) if rank in team)


@dataclass
class Sent:
    """What has left this device for experts elsewhere."""

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
    """Rows to other devices; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: list[int], come: list[int], groups: Groups) -> Tensor:
        ctx.way = come, to, groups.back
        return travel(rows, to, come, groups.out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return travel(grad, *ctx.way), None, None, None


class ParallelExperts(nn.Module):
    """This device's share of the experts, in place of all of them."""

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
        given, taken = torch.stack([sent, got]).tolist()  # a GPU is asked once
        to, come = list(map(sum, given)), list(map(sum, taken))
        rows = Journey.apply(rows, to, come, self.groups)
        rows = self.local(resorted(rows, taken), got.sum(0))
        back = list(map(list, zip(*taken, strict=True)))
        return Journey.apply(resorted(rows, back), come, to, self.groups)


def resorted(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Parts that lie row by row of the matrix of their sizes, now column by column."""
    high, wide = len(sizes), len(sizes[0])
    parts = rows.split([size for row in sizes for size in row])
    return torch.cat([parts[r * wide + c] for c in range(wide) for r in range(high)])


class Turns:
    """Threads of which one computes at a time."""

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
        """While this thread waits for something; nothing to do where nobody takes turns."""
        if not getattr(self.thread, "inside", False):
            yield
            return
        self.lock.release()
        yield
        self.lock.acquire()


TURNS = Turns()


def overlapped(action: Any, context: Any) -> None:
    """Both halves of an OVERLAP_F_B: what `_step_microbatches` does with each, in two threads."""
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
    """Every module called `experts` is replaced; returned are what took their places."""
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
    """One training step; `cut` makes the model's stages, given how many."""
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
    """Of experts, the rows of all replicas have been added up here already."""
    flat = torch.cat([p.grad.flatten() for p in dense])
    work = dist.all_reduce(flat, group=groups.dense, async_op=True)
    torch._foreach_div_([p.grad for p in own], groups.ways)
    work.wait()
    flat /= groups.ways
    sizes = [p.numel() for p in dense]
    for p, grad in zip(dense, flat.split(sizes), strict=True):
        p.grad.copy_(grad.view_as(p))
