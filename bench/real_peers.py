"""Piper beside DeepSpeed, Megatron-Core and TorchTitan, with defaults against defaults.

    piper run -n 4 --share-gpu bench/real_peers.py --group ds-zero --size large
    PIPER_DEVICE=cpu piper run -n 4 bench/real_peers.py --group megatron          (tiny)

The peers' packages are found in a folder: `--site`, by default .peers. docs/benchmarks.md says how
to fill it. All contenders train the same modules with torch's AdamW in the same processes, in turn.
The losses of their first steps are compared first. Peak memory is what a contender adds to a
process, the largest of all ranks; results have all of them. Contenders that are there at the same
time share what torch's allocator has reserved: `--memory` weighs each of them alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import real_deepspeed
import real_experts
import real_titan
import torch
from gpu_arena import DTYPES, TURNS
from gpu_models import SIZES
from gpu_peers import SCHEDULES, plain
from real_arena import RealArena
from real_megatron import Way, megatron

import piper

SITE = Path(__file__).parent.parent / ".peers"
FULL_BACKWARDS = ("1f1b", "interleaved-1f1b")  # TorchTitan trains nothing with PP x FSDP x ZBV


def replicated(world: int, parts: int, zero: int) -> list[Any]:
    """Every rank is a replica, with default options."""
    devices = list(range(world))
    return [
        piper.Place(piper.where(), devices),
        piper.Replicate(piper.where(), devices, zero=zero),
        piper.Split("MB", parts),
    ]


def ds_zero(arena: RealArena) -> None:
    """ZeRO 1, 2 and 3 over all ranks, and the losses of one plain process."""
    size, parts = arena.size, arena.chosen.microbatches or 4
    model = arena.shelf.get(size, size.layers)  # a region for each layer
    data = size.batch(arena.rank, parts)
    if arena.wanted("plain"):
        arena.tried("plain", lambda: plain_losses(arena, parts))
    for stage in (1, 2, 3):
        makers: dict[str, Any] = arena.pipers(model, replicated(arena.world, parts, stage), data)
        theirs: Any = partial(real_deepspeed.zero, arena, model, data, parts, stage)
        makers["deepspeed"] = theirs
        if arena.dtype == torch.bfloat16 and arena.chosen.master:
            makers["deepspeed, float32 copies"] = partial(theirs, master=True)
        arena.versus(f"zero={stage}", makers)


def plain_losses(arena: RealArena, parts: int) -> None:
    """One process on the batches of all replicas: the losses that everyone should find."""
    size, losses = arena.size, list[float]()
    if arena.rank == 0:
        batches = [size.batch(rank, parts) for rank in range(arena.world)]
        tokens, labels = (torch.cat(one) for one in zip(*batches, strict=True))
        model = arena.shelf.get(size, size.layers)
        one = plain(arena, model, (tokens, labels), parts * arena.world)
        losses = [one.step().item() for _ in range(TURNS)]
        arena.say(f"  one plain process: losses {[round(loss, 4) for loss in losses]}")
        del one
        arena.clean()
    arena.keep("plain", {"losses": {"one plain process": losses}})


def ds_pipe(arena: RealArena) -> None:
    """1F1B over all ranks; over half of them in two replicas with ZeRO-1."""
    size, world = arena.size, arena.world
    parts = arena.chosen.microbatches or size.microbatches
    for pp in (world, world // 2):
        stage = int(pp != world)
        model, data = arena.shelf.get(size, pp), size.batch(arena.rank // pp, parts)
        strategy = schedule("1f1b", pp, parts, world // pp, zero=stage)
        makers: dict[str, Any] = arena.pipers(model, strategy, data)
        peer = partial(real_deepspeed.pipeline, arena, model, size, parts, pp, stage)
        makers["deepspeed"] = peer
        arena.versus(f"pp={pp} dp={world // pp} zero={stage} 1f1b", makers)


def schedule(name: str, pp: int, parts: int, dp: int, **options: Any) -> Any:
    more = {"dp": dp, **options} if dp > 1 else {}
    return piper.strategies.BUILDERS[name](pp=pp, microbatches=parts, **more)


def with_megatron(arena: RealArena) -> None:
    """1F1B and interleaved 1F1B over all ranks; over half of them in two replicas."""
    size, world = arena.size, arena.world
    parts = arena.chosen.microbatches or size.microbatches
    for pp in (world, world // 2):
        for name, virtual in (("1f1b", 1), ("interleaved-1f1b", 2)):
            for zero in (0, 1) if pp < world else (0,):
                layered = pp < world  # its gradients are reduced during the last backward, too
                model = arena.shelf.get(size, pp * virtual, layered=layered)
                strategy = schedule(name, pp, parts, world // pp, zero=zero)
                makers: dict[str, Any] = arena.pipers(
                    model, strategy, size.batch(arena.rank // pp, parts)
                )
                way = Way(pp, virtual, sharded=bool(zero))
                peer: Any = partial(megatron, arena, model, size, parts)
                makers["megatron"] = partial(peer, way)
                if pp == world and virtual == 1:
                    makers["megatron, no p2p sync"] = partial(peer, Way(pp, sync=False))
                arena.versus(f"pp={pp} dp={world // pp} zero={zero} {name}", makers)


def with_titan(arena: RealArena) -> None:
    """Pipelines over all ranks; FSDP over all ranks; two by two."""
    size, world = arena.size, arena.world
    parts = arena.chosen.microbatches or size.microbatches
    for name in ("1f1b", "interleaved-1f1b", "zbv"):
        titan_pipeline(arena, name, world, parts)
    titan_fsdp(arena, arena.chosen.microbatches or 4)
    for name in FULL_BACKWARDS:
        titan_pipeline(arena, name, world // 2, parts)


def titan_pipeline(arena: RealArena, name: str, pp: int, parts: int) -> None:
    size, replicas = arena.size, arena.world // pp
    theirs, per_rank, _ = SCHEDULES[name]
    model = arena.shelf.get(size, pp * per_rank, layered=replicas > 1)
    strategy = schedule(name, pp, parts, replicas, zero=1)  # it keeps parameters, as zero=1 does
    makers: dict[str, Any] = arena.pipers(model, strategy, size.batch(arena.rank // pp, parts))
    makers["torchtitan"] = partial(real_titan.pipeline, arena, model, size, parts, pp, theirs)
    arena.versus(f"pp={pp} fsdp={replicas} {name}", makers)


def titan_fsdp(arena: RealArena, parts: int) -> None:
    """Its default reshards, as zero=3 does. What never reshards is nearest to zero=2."""
    size, model = arena.size, arena.shelf.get(arena.size, arena.size.layers)
    data = size.batch(arena.rank, parts)
    for zero, reshard in ((3, "default"), (2, "never")):
        makers: dict[str, Any] = arena.pipers(model, replicated(arena.world, parts, zero), data)
        makers["torchtitan"] = partial(real_titan.fsdp, arena, model, size, parts, reshard)
        arena.versus(f"fsdp={arena.world} reshard {reshard}, zero={zero}", makers)


def with_experts(arena: RealArena) -> None:
    """Experts that all ranks divide; and two stages, each of whose replicas divide them."""
    size = replace(arena.size, expert_hidden=arena.chosen.expert_hidden or arena.size.expert_hidden)
    parts = arena.chosen.microbatches or size.microbatches
    real_experts.replicas(arena, size, parts)
    real_experts.pipelines(arena, size, parts)


GROUPS: dict[str, Callable[[RealArena], None]] = {
    "ds-zero": ds_zero,
    "ds-pipe": ds_pipe,
    "megatron": with_megatron,
    "titan": with_titan,
    "experts": with_experts,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--group", nargs="+", default=list(GROUPS), choices=GROUPS)
    add("--site", default=str(SITE), help="the folder with the peers' packages")
    add("--size", choices=SIZES, help="by default medium on a GPU, tiny on a CPU")
    add("--dtype", choices=DTYPES, help="of weights; by default bf16 on a GPU, fp32 on a CPU")
    add("--rows", type=int, help="of a microbatch, if not those of the size")
    add("--microbatches", type=int, help="by default 4; 8 with pipelines")
    add("--expert-hidden", type=int, help="of experts: their width, if not that of the size")
    add("--repeats", type=int, default=9)
    add("--match", nargs="*", default=[], help="only entries whose names contain one of these")
    add("--skip", nargs="*", default=[], help="no entries whose names contain one of these")
    add("--only", nargs="*", default=[""], help="only contenders whose names contain one of these")
    add("--peers-only", action="store_true", help="without Piper, to see that the peers run")
    add("--eager", action="store_true", help="Piper without CUDA graphs, too")
    add("--kernels", action="store_true", help="profile a step of each, by kinds of kernels")
    add("--memory", action="store_true", help="only memory, of each contender alone")
    add("--master", action="store_true", help="DeepSpeed with float32 copies of weights, too")
    add("--seconds", type=float, default=140.0, help="a group starts no entry after this time")
    add("--fused", action="store_true", help="AdamW(fused=True) for Piper and DeepSpeed")
    add("--patience", type=float, default=100.0, help="seconds without progress before it ends")
    add("--out", help="file of results; by default bench/results/real_peers_MACHINE.json")
    add("--verbose", action="store_true", help="whole tracebacks of contenders that fail")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, chosen.site)
    os.environ |= {"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1"}
    arena = RealArena(chosen)
    os.environ["DS_ACCELERATOR"] = arena.device.type
    if not chosen.out:
        arena.out = arena.out.replace("gpu_", "real_peers_", 1)
    arena.say(f"{arena.machine()}, {arena.world} ranks, {arena.size}, {arena.dtype}")
    for name in chosen.group:
        arena.begin(name)
        arena.tried(name, partial(GROUPS[name], arena))
    arena.fence()
    sys.stdout.flush()
    os._exit(0)  # the peers' threads and communicators need not be taken apart


if __name__ == "__main__":
    main()
