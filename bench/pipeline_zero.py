"""PP=2 x DP=2: Piper's pipelines with ZeRO-2 and 3 against torch pipelining x FSDP2.

    python bench/pipeline_zero.py [--links normal 500mbit] [--schedules 1f1b gpipe]

The same model, schedule and microbatches on four ranks, in turn in the same processes. Goal: at
most the peer's step time, and less where communication can hide behind compute.

The peer without reshard gathers once and reduces once per step, so it keeps the whole gradients and
parameters of its stages. zero=1 does the same. With zero=2, Piper reduces the gradients of each
microbatch, so it sends more and keeps less.

The floor is compute alone. Four ranks share the cores here, so a step takes at least ranks / cores
times the compute of one rank. With M microbatches and a stage of P bytes, each rank sends, besides
activations,

    zero=1  P/2 + P/2      zero=2  M P/2 + P/2      zero=3  M P/2 + up to 2 M P/2

gloo's own reduce-scatter, which the peer uses, sends twice as much.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import interleaved, ratio, save, show
from links import NORMAL, launch
from models import Staged, batch, cross_entropy
from peers import ADAMW, SCHEDULES, Data, Step, pipelined

import piper
from piper.models.llama import LlamaConfig

PP, DP = 2, 2
PEERS = {
    "keep": partial(pipelined, reshard=False),
    "reshard": partial(pipelined, reshard=True),
    "plain reshard": partial(pipelined, reshard=True, ahead=False),
}
AGAINST = {1: ("keep",), 2: ("keep", "reshard"), 3: ("reshard", "plain reshard")}


def piper_step(model: Staged, data: Data, parts: int, name: str, zero: int) -> Step:
    strategy = piper.strategies.BUILDERS[name](pp=PP, microbatches=parts, dp=DP, zero=zero)
    trainer = piper.Trainer(model, cross_entropy, strategy, optimizer=ADAMW, example=data)
    return lambda: trainer.step(*data).loss


def contenders(
    name: str, model: Staged, data: Data, parts: int, zeros: list[int]
) -> dict[str, Step]:
    """Ours next to theirs, so that a pair is measured close in time."""
    found: dict[str, Step] = {}
    for zero in zeros:
        found[f"zero={zero}"] = piper_step(copy.deepcopy(model), data, parts, name, zero)
        for peer in AGAINST[zero]:
            if peer not in found:
                found[peer] = PEERS[peer](name, copy.deepcopy(model), data, parts, PP)
    return found


def same_losses(steps: dict[str, Step], turns: int = 3, tolerance: float = 1e-4) -> None:
    """Only last stages know the peer's loss: take the mean over the replicas."""
    expected: list[float] = []
    for name, step in steps.items():
        found = torch.tensor([[step(), 1.0] for _ in range(turns)], dtype=torch.float64)
        found[found[:, 0].isnan()] = 0.0
        dist.all_reduce(found)
        losses = (found[:, 0] / found[:, 1]).tolist()
        expected = expected or losses
        if not max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < tolerance:
            raise SystemExit(f"{name}: losses {losses}, expected {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", nargs="*", default=[NORMAL, "500mbit"])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--zero", nargs="*", type=int, default=list(AGAINST), choices=AGAINST)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    chosen, given = parser.parse_args(), sys.argv[1:]
    if "RANK" not in os.environ:
        for link in chosen.links:
            launch(str(Path(__file__).resolve()), [*given, "--link", link], PP * DP, link)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(vocab=1024, dim=chosen.dim, layers=chosen.layers, heads=4)
    whole = batch(config, DP * chosen.microbatches, chosen.length)
    data = tuple(tensor.chunk(DP)[dist.get_rank() // PP] for tensor in whole)
    for name in chosen.schedules:
        model = Staged(config, PP * SCHEDULES[name][1])
        steps = contenders(name, model, data, chosen.microbatches, chosen.zero)
        same_losses(steps)
        times = interleaved(steps, chosen.repeats, warmup=1, fence=dist.barrier)
        ratios = {}
        for zero in chosen.zero:
            for peer in AGAINST[zero]:
                pair = f"{name}, zero={zero} / {peer}"
                ratios[pair] = ratio(times, f"zero={zero}", peer)
                if dist.get_rank() == 0:
                    show(f"{chosen.link}, {pair}", ratios[pair])
        if dist.get_rank() == 0:
            save(f"pipeline_zero_{chosen.link}_{name}", {"ratios": ratios, "seconds": times})
    dist.barrier()


if __name__ == "__main__":
    main()
