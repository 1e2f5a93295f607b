"""Groups of bench/gpu.py that compare step times: one device, replicas, pipelines."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from common import interleaved
from gpu_arena import Arena, Contender
from gpu_models import half_as_deep
from gpu_peers import CUT_BACKWARDS, SCHEDULES, ddp, fsdp2, pipelined, plain, replica

import piper

REPLICAS = {  # zero: peers that do the same, or the same with less communication and more memory
    0: {"ddp": ddp},
    1: {"fsdp2 keep, once": partial(fsdp2, reshard=False, each=False)},
    2: {
        "fsdp2 keep, each": partial(fsdp2, reshard=False, each=True),
        "fsdp2 keep, once": partial(fsdp2, reshard=False, each=False),
    },
    3: {
        "fsdp2 reshard, each": partial(fsdp2, reshard=True, each=True),
        "fsdp2 reshard, once": partial(fsdp2, reshard=True, each=False),
    },
}

WAYS: dict[int, dict[str, dict[str, Any]]] = {  # as each peer does it
    **{zero: {"piper": {}} for zero in (0, 1, 2)},
    3: {"piper": {}, "piper once": {"reduce": "once", "gather_buffers": 2}},
}


def one(arena: Arena) -> None:
    """One device: eager against eager, compiled against torch.compile, graphs against graphs."""
    size, parts = half_as_deep(arena.size), arena.chosen.microbatches or 4
    data = size.batch(parts=parts)
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", parts)]
    for kind in arena.chosen.models:
        model = arena.shelf.get(size, 2, moe=kind == "moe")
        ours: Any = partial(arena.ours, model, strategy, data)
        theirs: Any = partial(plain, arena, model, data, parts)
        arena.contest(kind, {"piper": ours, "eager": theirs})
        if arena.chosen.compile:
            makers = {"piper compiled": partial(ours, compiled=True), "eager": theirs}
            makers["torch.compile"] = partial(theirs, dynamic=False)
            arena.contest(f"{kind}, compiled", makers)
        graphs(arena, kind, ours, theirs)


def graphs(
    arena: Arena, kind: str, ours: Callable[..., Contender], theirs: Callable[..., Contender]
) -> None:
    """CUDA graphs of eager kernels, and of Inductor's kernels, as the peer has them."""
    if not arena.on_gpu or "graphs" not in inspect.signature(piper.Trainer).parameters:
        arena.say(f"{kind}, graphs: not here (no GPU, or Trainer has no `graphs`)")
        return
    arena.contest(f"{kind}, graphs", {"piper graphs": partial(ours, graphs=True), "eager": theirs})
    if arena.chosen.compile:
        makers = {
            "piper compiled graphs": partial(ours, compiled=True, graphs=True),
            "torch.compile reduce-overhead": partial(theirs, mode="reduce-overhead"),
        }
        arena.contest(f"{kind}, compiled graphs", makers)


def dp(arena: Arena) -> None:
    """All ranks are replicas: ZeRO 0 to 3 against DDP and FSDP2, one region or unit per layer."""
    size, parts = arena.size, arena.chosen.microbatches or 4
    model = arena.shelf.get(size, size.layers)
    data = size.batch(arena.rank, parts)
    weights = sum(p.nbytes for p in model.parameters())
    arena.say(f"dp: {weights / 1e6:.0f} MB of parameters, {parts} microbatches")
    devices = list(range(arena.world))
    for zero in arena.chosen.zero:
        makers: dict[str, Any] = {}
        for ours, options in WAYS[zero].items():
            strategy = [
                piper.Place(piper.where(), devices),
                piper.Replicate(piper.where(), devices, zero=zero, **options),
                piper.Split("MB", parts),
            ]
            makers |= arena.both(model, strategy, data, ours)
        for name, make in REPLICAS[zero].items():
            makers[name] = partial(make, arena, model, data, parts)
        arena.contest(f"zero={zero}", makers, more={"parameter_bytes": weights})
    if arena.wanted("compute alone"):
        alone(arena, model, data, parts)


def alone(arena: Arena, model: Any, data: Any, parts: int) -> None:
    """The floor: the same microbatches without reductions. Replicas differ, so no comparison."""
    arena.watch()
    steps = {"compute alone": plain(arena, model, data, parts).step}
    times = interleaved(steps, arena.chosen.repeats, warmup=2, fence=arena.fence)
    arena.keep("compute alone", {"seconds": times})
    arena.say(f"compute alone: {1e3 * statistics.median(times['compute alone']):.1f} ms")


def pp(arena: Arena) -> None:
    """Pipelines over all ranks, then over half of them in two replicas."""
    size, parts, world = (
        arena.size,
        arena.chosen.microbatches or arena.size.microbatches,
        arena.world,
    )
    for name in arena.chosen.schedules:
        model = arena.shelf.get(size, world * SCHEDULES[name][1])
        data = size.batch(parts=parts)
        strategy = piper.strategies.BUILDERS[name](pp=world, microbatches=parts)
        makers: dict[str, Any] = {
            **arena.both(model, strategy, data),
            "torch": partial(pipelined, arena, name, model, data, parts, world),
        }
        arena.contest(f"pp={world} {name}", makers)
    if world % 2 or world < 4:
        return
    for name in arena.chosen.schedules:
        for zero in arena.chosen.pp_zero:
            sharded(arena, name, zero, parts, world // 2)


def sharded(arena: Arena, name: str, zero: int, parts: int, ways: int) -> None:
    """zero=1 does what FSDP2 without reshard does under pipelining: gather and reduce once.

    With reshard, FSDP2 is zero=3 that reduces once. It does not drop parameters after a backward,
    so for part of the time it holds all of a rank. "piper once" also reduces once, and may hold as
    many layers as a rank has. Schedules that split backwards lose gradients in FSDP2 with reshard,
    so there is no such peer.
    """
    size, entry = arena.size, f"pp={ways} dp={arena.world // ways} {name} zero={zero}"
    if not arena.wanted(entry):
        return
    model = arena.shelf.get(size, ways * SCHEDULES[name][1], layered=True)
    data = size.batch(replica(arena, ways), parts)
    build = piper.strategies.BUILDERS[name]
    makers: dict[str, Any] = {}
    for ours, options in WAYS[zero].items():
        more = {**options, "gather_buffers": size.layers // ways} if options else {}
        strategy = build(pp=ways, microbatches=parts, dp=arena.world // ways, zero=zero, **more)
        makers |= arena.both(model, strategy, data, ours)
    reshard = zero == 3
    if reshard and name in CUT_BACKWARDS:
        arena.say(f"{entry}: torch loses gradients with reshard; beside keep")
        reshard = False
    peer = f"torch x fsdp2 {'reshard' if reshard else 'keep'}"
    makers[peer] = partial(pipelined, arena, name, model, data, parts, ways, reshard)
    arena.contest(entry, makers)
