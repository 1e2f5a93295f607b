"""PP=2 x EP=2 of bench/gpu.py: all-to-alls with and without overlap.

The peers are torch.distributed.pipelining with an all-to-all in the module (expert_peers.py). On a
GPU, none of them overlaps it with another microbatch. The overlap by hand of bench/experts.py is
for CPUs; on a GPU it would need its own streams.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from expert_peers import SCHEDULES, Groups, peer
from experts import in_turn
from gpu_arena import Arena, Contender
from gpu_models import Data, Size, Whole, half_as_deep
from gpu_peers import plain, replica

import piper
from piper.capture import capture
from piper.costs import Costs
from piper.errors import InputError
from piper.names import BI, BW, F

PP = 2
OURS = "piper dualpipev"
PIPERS = {  # contender: (schedule, whether slots keep their overlap, ahead)
    OURS: ("dualpipev", True, None),
    "piper dualpipev pairs": ("dualpipev", True, "pairs"),  # neighbouring slots overlap, too
    "piper dualpipev eager": ("dualpipev", True, None),  # on a GPU the others run CUDA graphs
    "piper dualpipev in turn": ("dualpipev", False, False),
    "piper 1f1b": ("1f1b", True, None),
    "piper 1f1b in turn": ("1f1b", True, False),
    "piper interleaved-1f1b": ("interleaved-1f1b", True, None),
    "piper zbv": ("zbv", True, None),
}
PEERS = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
STAGES = {ours: PP * per_rank for ours, per_rank, _ in SCHEDULES.values()}


class Cuts:
    """Stages for a peer, copied on demand, because a rank needs few of them."""

    def __init__(self, model: Whole, device: torch.device) -> None:
        self.model, self.device = model, device

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self.model.cuts[index]).to(self.device)


def exchange_seconds(arena: Arena, size: Size, parts: int, groups: Groups) -> tuple[float, float]:
    """Seconds of all all-to-alls of a step alone, and bytes per second of one of them.

    Four per layer and microbatch: dispatch and combine, of rows and of gradients.
    """
    rows = size.rows * size.length * 2 // groups.ways * groups.ways
    given = torch.zeros(rows, size.dim, dtype=arena.dtype, device=arena.device)
    into, count = torch.empty_like(given), 4 * parts * size.layers // PP
    tries = min(count, 32)
    for turn in range(2):  # the first one connects
        arena.fence()
        started = time.perf_counter()
        for _ in range(tries if turn else 2):
            dist.all_to_all_single(into, given, group=groups.out)
        arena.fence()
    each = arena.most(time.perf_counter() - started) / tries
    return each * count, given.nbytes * (groups.ways - 1) / groups.ways / each


def transfer_seconds(arena: Arena, size: Size, parts: int, rate: float) -> float:
    """Seconds of the transfers between stages: in a V, one message forwards, one backwards."""
    message = size.rows * size.length * size.dim * arena.dtype.itemsize
    return 2 * parts * message / rate


def compute_seconds(arena: Arena, size: Size, data: Data, parts: int) -> float:
    """Seconds of one rank's layers, eager, with all experts here: no communication."""
    model = arena.shelf.get(half_as_deep(size, PP), 1, moe=True)
    step = plain(arena, model, data, parts).step
    found = []
    for _ in range(4):
        arena.fence()
        started = time.perf_counter()
        step()
        arena.fence()
        found.append(arena.most(time.perf_counter() - started))
    return sorted(found)[1]


def balanced_size(arena: Arena, parts: int, groups: Groups) -> tuple[Size, dict[str, Any]]:
    """The width of experts, among those given, whose messages take about as long as compute."""
    tried = []
    own = arena.size.expert_hidden
    for hidden in arena.chosen.expert_hidden or (
        [own, 2 * own, 4 * own, 8 * own] if arena.on_gpu else [own]
    ):
        arena.watch()
        size = replace(arena.size, expert_hidden=hidden)
        data = size.batch(replica(arena, PP), parts)
        compute = compute_seconds(arena, size, data, parts)
        exchanges, rate = exchange_seconds(arena, size, parts, groups)
        transfers = transfer_seconds(arena, size, parts, rate)
        ratio = (exchanges + transfers) / compute
        found = {"expert_hidden": hidden, "compute_s": compute, "exchanges_s": exchanges}
        found |= {"transfers_s": transfers, "ratio": ratio, "bytes_per_s": rate}
        tried.append((size, found))
        arena.say(
            f"experts {hidden} wide: compute {1e3 * compute:.1f} ms, exchanges alone "
            f"{1e3 * exchanges:.1f} ms ({rate / 1e9:.2f} GB/s), transfers between stages "
            f"{1e3 * transfers:.1f} ms, ratio {ratio:.2f}"
        )
        arena.clean()
    return min(tried, key=lambda pair: max(pair[1]["ratio"], 1 / pair[1]["ratio"]))


def costs(arena: Arena, model: Whole, data: Data, parts: int, found: dict[str, Any]) -> Costs:
    """What was measured, as costs that order a strategy."""
    one = tuple(tensor[: tensor.shape[0] // parts] for tensor in data)
    regions = capture(model, model.loss, one, arena.device.type).model.regions
    flops = sum(r.flops.get(phase, 0) for r in regions for phase in (F, BI, BW))
    rate = flops * parts / PP / found["compute_s"]
    link = found["bytes_per_s"]
    return Costs(flops=rate, memory=1e15, link=link, latency=2e-4, streams={"ep": link}, ahead=True)


def ours(
    arena: Arena, size: Size, data: Data, parts: int, found: dict[str, Any], name: str
) -> Contender:
    schedule, slots, ahead = PIPERS[name]
    options = {} if ahead is None else {"ahead": ahead}
    build = piper.strategies.BUILDERS[schedule]
    strategy = build(
        pp=PP, microbatches=parts, dp=arena.world // PP, ep=arena.world // PP, **options
    )
    model = arena.shelf.get(size, STAGES[schedule], moe=True)
    measured = costs(arena, model, data, parts, found) if arena.chosen.costs else None
    made = arena.ours(
        model, strategy if slots else in_turn(strategy), data, costs=measured,
        graphs=arena.on_gpu and not name.endswith("eager"),
    )  # fmt: skip
    try:
        assert made.trainer is not None
        made.trainer.tune(*data)
    except InputError:  # tell all ranks if nothing can be timed
        pass
    return made


def theirs(
    arena: Arena, size: Size, data: Data, parts: int, groups: Groups, name: str
) -> Contender:
    def cut(stages: int) -> Any:
        return Cuts(arena.shelf.get(size, stages, moe=True), arena.device)

    loss_fn: Callable[..., Any] = arena.shelf.get(size, PP, moe=True).loss
    here = tuple(tensor.to(arena.device) for tensor in data)
    step = peer(name, cut, loss_fn, arena.adamw, here, parts, groups, arena.device)  # type: ignore[arg-type]
    return Contender(step)


def ep(arena: Arena) -> None:
    """One of ours against every other contender, in pairs. Ours stays for all pairs."""
    mine = arena.chosen.ours
    parts = arena.chosen.microbatches or arena.size.microbatches
    groups = Groups(PP, arena.world // PP)
    size, found = balanced_size(arena, parts, groups)
    arena.keep("communication / compute", found)
    arena.say(f"chosen: experts {size.expert_hidden} wide, ratio {found['ratio']:.2f}")
    data = size.batch(replica(arena, PP), parts)
    makers: dict[str, Callable[[], Contender]] = {
        name: partial(ours, arena, size, data, parts, found, name) for name in PIPERS
    }
    for name in PEERS:
        makers[f"torch {name}"] = partial(theirs, arena, size, data, parts, groups, name)
    first, reason = arena.tried(mine, makers.pop(mine))
    if reason:
        return
    first.kept = True
    for name, make in makers.items():
        arena.contest(name, {mine: lambda: first, name: make}, [(mine, name)])
    first.close()
