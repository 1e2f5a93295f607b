"""Pipelines: Piper against torch.distributed.pipelining, same model, schedule and microbatches.

    piper run bench/pipelining.py -n 2          (and -n 4)

Both live in the same processes and take steps in turn. Goal: at most the peer's step time.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
import torch.distributed as dist
from common import interleaved, ratio, save, show
from models import Staged, batch, cross_entropy
from torch.distributed.pipelining import PipelineStage, schedules

import piper
from piper.models.llama import LlamaConfig

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
PEERS = {  # ours: (theirs, stages per rank, V-shaped)
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved-1f1b": ("Interleaved1F1B", 2, False),
    "interleaved-zb": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}


def stage_ids(rank: int, ranks: int, per_rank: int, v_shaped: bool) -> list[int]:
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + k * ranks for k in range(per_rank)]


def peer_step(name: str, model: Staged, data, parts: int):
    """One training step as a user of torch.distributed.pipelining writes it."""
    theirs, per_rank, v_shaped = PEERS[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * per_rank
    ids = stage_ids(rank, ranks, per_rank, v_shaped)
    mine = [model.stages[k] for k in ids]
    stages = [
        PipelineStage(m, k, count, torch.device("cpu")) for m, k in zip(mine, ids, strict=True)
    ]
    kind = schedules.get_schedule_class(theirs)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, n_microbatches=parts, loss_fn=cross_entropy)
    optimizer = ADAMW([p for module in mine for p in module.parameters()])
    tokens, labels = data

    def step() -> float:
        losses: list[torch.Tensor] = []
        target = {"target": labels, "losses": losses} if count - 1 in ids else {}
        schedule.step(*([tokens] if 0 in ids else []), **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--match", default="")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks, results = dist.get_world_size(), {}
    config = LlamaConfig(vocab=1024, dim=chosen.dim, layers=8, heads=4)
    data = batch(config, chosen.microbatches, chosen.length)
    for name in chosen.match.split(",") if chosen.match else runnable():
        model = Staged(config, ranks * PEERS[name][1])
        strategy = piper.strategies.BUILDERS[name](pp=ranks, microbatches=chosen.microbatches)
        peer = peer_step(name, copy.deepcopy(model), data, chosen.microbatches)
        trainer = piper.Trainer(model, cross_entropy, strategy, optimizer=ADAMW, example=data)
        same_loss(trainer, peer, data)
        steps = {"piper": partial(trainer.step, *data), "peer": peer}
        times = interleaved(steps, chosen.repeats, fence=dist.barrier)
        results[name] = ratio(times, "piper", "peer")
        if dist.get_rank() == 0:
            show(f"{ranks} ranks, {name}", results[name])
        trainer.close()
    if dist.get_rank() == 0:
        save(f"pipelining_{ranks}", results)


def runnable() -> list[str]:
    """Before 2.13 the peer's V-shaped schedules fail on gloo: a rank cannot send to itself."""
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    return [name for name, (_, _, v_shaped) in PEERS.items() if not (old and v_shaped)]


def same_loss(trainer: piper.Trainer, peer, data) -> None:
    """Stop if the two compute different losses."""
    ours, theirs = trainer.step(*data).loss, peer()
    if theirs == theirs and abs(ours - theirs) > 1e-4:
        raise SystemExit(f"losses differ: {ours} and {theirs}")


if __name__ == "__main__":
    main()
