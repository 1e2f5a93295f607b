"""Another strategy in mid-run: compiled first, then the state moves, then it takes over."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from piper.directives import Strategy
from piper.errors import InputError
from piper.job import consistency
from piper.job.batch import Batch
from piper.job.programs import Programs
from piper.names import amount
from piper.runtime.checkpoint.description import names_of
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.state.held_pieces import keep_unused
from piper.runtime.state.movement import move

LOG = logging.getLogger("piper")


def retargeted(
    peers: Peers, old: Programs, strategy: Strategy, example: Batch, steps: int
) -> tuple[Programs, Batch, int]:
    """Programs of the new strategy, with the state of the old one; an example of its batches; and
    the bytes that were sent.

    If the strategy is not supported, the old programs are as they were.
    """
    consistency.refuse_disagreement({"strategy": str(strategy)}, torch.nn.Module())
    job = old.job.under(strategy)
    new = Programs(job, old.rank, old.arguments, old.costs, agreed=True)
    new.shipping = old.shipping  # kernels that were sent need not be sent again
    batch = resized(example, old.job.replicas, job.replicas)
    try:
        new.get(batch, job.kind(batch), steps)
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


def resized(example: Batch, before: int, after: int) -> Batch:
    """A batch of the same form, of one of `after` parts of the data instead of `before`."""

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.shape[0] * before if tensor.dim() else 0
        if rows % after:
            raise InputError.of(
                "strategy",
                f"it has {amount(after, 'replica')}, which do not divide {rows} rows of data",
                "choose another number of replicas",
            )
        shape = (rows // after, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.zeros(shape, dtype=tensor.dtype)

    return replace(example, leaves=example.map(zeros).leaves)
