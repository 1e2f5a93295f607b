"""Masters are rounded to their own place in a gather buffer: NCCL then gathers in place."""

from __future__ import annotations

import pytest
import torch

from piper.plan.instructions import Gather
from piper.runtime.comm.gather_buffers import GatherViews

GROUP = (4, 1, 6)
LAYOUT = (("bfloat16", (0, 2), 6), ("float32", (1,), 3))
SHAPES = (((4,), "bfloat16"), ((3,), "float32"), ((1,), "bfloat16"))
GATHER = Gather("gather", "w", "W", LAYOUT, SHAPES, GROUP, 0, "dp")


@pytest.mark.parametrize("device", GROUP)
def test_a_shard_is_sent_from_where_it_arrives(device: int) -> None:
    views = GatherViews.of(torch.zeros(4096, dtype=torch.uint8), GATHER, device)
    masters, kept = torch.tensor([1.0, 1 + 2.0**-12]), torch.tensor([5.0])

    (whole, sent), (other, same) = views.sent((masters, kept))

    first = 2 * GROUP.index(device)
    assert sent.data_ptr() == whole[first:].data_ptr() and sent.dtype == torch.bfloat16
    assert whole.tolist() == [float(first <= k < first + 2) for k in range(6)], "and no other"
    assert same is kept and not other.any(), "what has the type of its masters stays where it is"
