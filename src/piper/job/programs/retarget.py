"""Another strategy in mid-run: compiled first, then the state moves, then it takes over."""

from __future__ import annotations

import logging

import torch

from piper.directives import Strategy
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.replica_batches import ReplicaBatches
from piper.job.optimizer_options import refuse_lost
from piper.job.processes import consistency
from piper.job.programs.programs import Programs
from piper.names import amount
from piper.runtime.checkpoint.description import names_of
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.movement.held_pieces import keep_unused
from piper.runtime.movement.movement import move

LOG = logging.getLogger("piper")


def retargeted(
    peers: Peers, old: Programs, strategy: Strategy, example: Batch, steps: int
) -> tuple[Programs, Batch, int]:
    """Programs of the new strategy, with the state of the old one; an example of its batches; and
    the bytes that were sent.

    If the strategy is not supported, the old programs are as they were.
    """
    consistency.refuse_disagreement({"strategy": str(strategy)}, torch.nn.Module())
    if steps:
        refuse_lost(old.job.options, old.job.model)
    job = old.job.under(strategy)
    new = Programs(job, old.rank, old.arguments, old.costs, agreed=True)
    new.shipping = old.shipping  # kernels that were sent need not be sent again
    batch = resized(example, old.job.rows, job.rows)
    try:
        new.get(batch, job.kind(batch, 0), steps)
        sent = move(peers, old.state, old.turns, new.state)
        used = set[str]().union(*peers.everyone(names_of(new.state)))
        keep_unused(peers, old.state, old.turns, new.state, used)
        if old.state.loss_scale and new.state.loss_scale:
            new.state.loss_scale.restore(old.state.loss_scale.saved["loss_scale"])
    except BaseException:
        new.close()
        raise
    old.close()
    LOG.info("another strategy: %s moved between devices", amount(sent, "byte"))
    return new, batch, sent


def resized(example: Batch, before: ReplicaBatches, after: ReplicaBatches) -> Batch:
    """A batch of the same form for the first replica of the new strategy, of the same data."""

    rows = first_rows(before.everywhere(example.rows or 0, 0), after)
    zeros = example.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    return zeros.change_rows(lambda tensor: tensor.new_zeros((rows, *tensor.shape[1:])))


def first_rows(rows: int, after: ReplicaBatches) -> int:
    """The rows of the first replica, of those of all together."""
    count = len(after.feeds.feeds)
    if after.unequal:
        return after.shares(rows)[0]
    if rows % count:
        raise InputError.of(
            "strategy",
            f"it has {amount(count, 'replica')}, which do not divide {rows} rows of data",
            "choose another number of replicas",
        )
    return rows // count
