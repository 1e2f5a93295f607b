"""Train in processes whose replicas are given different numbers of rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from replicas import ADAMW, batches, build

from piper import Trainer
from piper.strategies import one_f_one_b

SIZES = (4, 2)  # the rows of the second would not do for the first


def own_rows(batch: tuple[torch.Tensor, ...], replica: int, sizes: tuple[int, ...]) -> Any:
    """The rows of a replica, of those of all together."""
    ends = [0, *(sum(sizes[: k + 1]) for k in range(len(sizes)))]
    first, last = list(pairwise(ends))[replica]
    whole = ends[-1]
    return tuple(one[first * len(one) // whole : last * len(one) // whole] for one in batch)


def train(rank: int, pp: int, folder: str) -> dict[str, Any]:
    """Three steps, a checkpoint after the second; then evaluate, predict, and step three again."""
    model, loss_fn = build("uneven", 2)
    data = batches("uneven", 6)
    strategy = one_f_one_b(pp=pp, dp=2, microbatches=2, zero=3, replica_sizes=SIZES)
    example = own_rows(data[0], 0, SIZES)

    def made() -> Trainer:
        return Trainer(model, loss_fn, strategy, optimizer=ADAMW, example=example)

    trainer = made()
    mine = [own_rows(batch, trainer.replica, SIZES) for batch in data]
    metrics = [trainer.step(*batch) for batch in mine[:2]]
    trainer.save(folder)
    metrics += [trainer.step(*batch) for batch in mine[2:]]
    evaluation, outputs = trainer.evaluate(mine), trainer.predict(mine[0][0])
    whole = trainer.state_dict()
    trainer.close()
    again = made()
    again.resume(folder)
    resumed = [again.step(*batch).loss for batch in mine[2:]]
    wrong = []
    for odd in (mine[0][0][:1], torch.cat([mine[0][0]] * (1 + again.replica))):
        try:
            again.step(odd, odd)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
    again.close()
    return {
        "losses": [one.loss for one in metrics], "resumed": resumed, "whole": whole,
        "step samples": metrics[0].samples, "samples": evaluation.samples, "wrong": wrong,
        "evaluated": evaluation.loss, "outputs": outputs, "replica": again.replica,
    }  # fmt: skip
