"""Two replicas: Piper's ZeRO levels against DDP and FSDP2, same model, batch and microbatches.

    python bench/data_parallel.py [--links normal 500mbit] [--microbatches 1 4]

All contenders live in the same processes and take steps in turn. Goal: at most the peer's step
time, and less where communication can hide behind compute.

The floor of a step is the larger of two times: compute alone (measured with the same steps of a
model that reduces nothing), and the bytes that each rank must send at the rate of the link. With P
bytes of parameters, two ranks and M microbatches, each rank sends

    zero=0  P                  all-reduce, once
    zero=1  P/2 + P/2          reduce-scatter and gather, once
    zero=2  M P/2 + P/2        reduce-scatter of every microbatch, gather once
    zero=3  M P/2 + M P        gathers in forward and backward, too (less what two buffers keep)

gloo's own reduce-scatter, which FSDP2 uses, sends as much as an all-reduce: P instead of P/2.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import interleaved, ratio, save, show
from links import NORMAL, launch
from models import Staged, batch, cross_entropy
from peers import ADAMW, Data, Step, accumulating, ddp, fsdp2

import piper
from piper.models.llama import LlamaConfig

RANKS = 2
LAYERS = 8
PEERS = {
    "ddp": ddp,
    "ddp, layer buckets": partial(ddp, bucket_mb=4.0),  # a layer has 3.2 MB, like Piper's messages
    "fsdp2 keep, reduce once": partial(fsdp2, reshard=False, each=False),
    "fsdp2 keep, reduce each": partial(fsdp2, reshard=False, each=True),
    "fsdp2 reshard, reduce once": partial(fsdp2, reshard=True, each=False),
    "fsdp2 reshard, reduce each": partial(fsdp2, reshard=True, each=True),
    "plain fsdp2 keep, reduce each": partial(fsdp2, reshard=False, each=True, ahead=False),
    "plain fsdp2 reshard, reduce each": partial(fsdp2, reshard=True, each=True, ahead=False),
}
AGAINST = {  # peers that do the same, or the same with less communication or without prefetch
    0: ("ddp", "ddp, layer buckets"),
    1: ("fsdp2 keep, reduce once",),
    2: ("fsdp2 keep, reduce each", "plain fsdp2 keep, reduce each", "fsdp2 keep, reduce once"),
    3: (
        "fsdp2 reshard, reduce each",
        "plain fsdp2 reshard, reduce each",
        "fsdp2 reshard, reduce once",
    ),
}


def strategy(zero: int, parts: int, **options: object) -> list[object]:
    devices = list(range(RANKS))
    return [
        piper.Place(piper.where(), devices),
        piper.Replicate(piper.where(), devices, zero=zero, **options),
        piper.Split("MB", parts),
    ]


def piper_step(model: Staged, data: Data, parts: int, zero: int) -> Step:
    trainer = piper.Trainer(
        model, cross_entropy, strategy(zero, parts), optimizer=ADAMW, example=data
    )
    return lambda: trainer.step(*data).loss


def contenders(model: Staged, data: Data, parts: int, zeros: list[int]) -> dict[str, Step]:
    """Ours next to theirs, so that a pair is measured close in time."""
    found = {"compute": accumulating(copy.deepcopy(model), data, parts)}
    for zero in zeros:
        found[f"zero={zero}"] = piper_step(copy.deepcopy(model), data, parts, zero)
        for peer in AGAINST[zero]:
            if peer not in found and wanted(peer, parts):
                found[peer] = PEERS[peer](copy.deepcopy(model), data, parts)
    return found


def wanted(peer: str, parts: int) -> bool:
    """With one microbatch, `once` and `each` are the same."""
    return parts > 1 or not peer.endswith("once") or peer == "fsdp2 keep, reduce once"


def same_losses(steps: Mapping[str, Step], turns: int = 3, tolerance: float = 1e-4) -> None:
    """Stop if contenders compute different losses. A peer knows only the loss of its rank."""
    expected: list[float] = []
    for name, step in steps.items():
        if name == "compute":
            continue
        found = torch.tensor([step() for _ in range(turns)], dtype=torch.float64)
        if not name.startswith("zero"):
            dist.all_reduce(found)
            found /= dist.get_world_size()
        expected = expected or found.tolist()
        worst = max(abs(a - b) for a, b in zip(found.tolist(), expected, strict=True))
        if not worst < tolerance:
            raise SystemExit(f"{name}: losses {found.tolist()}, expected {expected}")


def report(times: dict[str, list[float]], zeros: list[int], where: str) -> dict[str, object]:
    found = {}
    for zero in zeros:
        for peer in AGAINST[zero]:
            if peer in times:
                name = f"zero={zero} / {peer}"
                found[name] = ratio(times, f"zero={zero}", peer)
                if dist.get_rank() == 0:
                    show(f"{where}, {name}", found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="*", default=[NORMAL, "500mbit"])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--zero", nargs="*", type=int, default=list(AGAINST), choices=AGAINST)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="of each rank's batch")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    chosen, given = parser.parse_args(), sys.argv[1:]
    if "RANK" not in os.environ:
        for link in chosen.links:
            launch(str(Path(__file__).resolve()), [*given, "--link", link], RANKS, link)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(vocab=1024, dim=chosen.dim, layers=LAYERS, heads=4)
    model = Staged(config, LAYERS)
    size = 4 * sum(p.numel() for p in model.parameters())
    whole, rank = batch(config, RANKS * chosen.rows, chosen.length), dist.get_rank()
    data = tuple(tensor.chunk(RANKS)[rank] for tensor in whole)
    for parts in chosen.microbatches:
        steps = contenders(model, data, parts, chosen.zero)
        same_losses(steps)
        times = interleaved(steps, chosen.repeats, warmup=1, fence=dist.barrier)
        where = f"{chosen.link}, {parts} mb"
        if rank == 0:
            alone = 1e3 * statistics.median(times["compute"])
            print(f"{where}: compute alone {alone:.0f} ms, parameters {size / 1e6:.1f} MB")
        ratios = report(times, chosen.zero, where)
        results = {"parameter_bytes": size, "ratios": ratios, "seconds": times}
        if rank == 0:
            save(f"data_parallel_{chosen.link}_{parts}", results)
    dist.barrier()


if __name__ == "__main__":
    main()
