"""Messages of an earlier division, along another axis: each device sends its part."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from piper.capture.graphs.division.calls import Call, Option
from piper.capture.graphs.division.rules.table import rule
from piper.capture.kernels import conversion
from piper.ir.placement.placements import Cut, Partial, Step

assert conversion.CONVERT  # which registers the operator
SAME = (Step.ALL_REDUCE, Step.NOTHING, Step.SHIFT, Step.SHIFT_BACK)  # the order of elements stays
LONGER, SHORTER = (Step.ALL_GATHER,), (Step.REDUCE_SCATTER, Step.SLICE)


@rule(torch.ops.piper.convert)
def converted(call: Call) -> Iterator[Option]:
    """A message joins or cuts tensors along dimension 0. Others may be cut as they are.

    Along dimension 0, every piece that travels is cut in as many blocks as any other.
    """
    step, pieces = Step(call.argument("forward")), call.argument("ways")
    for cut in call.cuts(range(1, len(call.shape))):
        yield Option((cut,), cut)
    for blocks in call.blocks:
        if step in SAME:
            yield Option((Cut(0, blocks),), Cut(0, blocks))
        else:
            every = Cut(0, blocks * pieces)
            read = Cut(0, blocks) if step in LONGER else every
            yield Option((read,), Cut(0, blocks) if step in SHORTER else every)
    yield Option((Partial(),), Partial())
