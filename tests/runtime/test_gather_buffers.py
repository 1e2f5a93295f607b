"""Gather buffers: masters are rounded to their own place, and memory is there while it is used."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.directives import Strategy
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed
from piper.plan.instructions import Gather
from piper.runtime.comm.gather_buffers import GatherBuffer, GatherViews, gathered_bytes

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


class Passing(nn.Module):
    """The first region passes views of its parameters on to the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale, self.matrix = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(8, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("L"):
            x = self.layers[0](x)
            views = self.scale[:8].expand(x.shape[0], 8), self.matrix.t(), self.matrix.detach()
        for layer in self.layers[1:]:
            with piper.annotate("L"):
                x = torch.sin(layer(x))
        with piper.annotate("L"):
            return ((x * views[0]) @ views[1]) @ views[2]


def test_views_of_gathered_parameters_outlive_no_memory() -> None:
    """Parameters are freed after their last use, and views of them are uses."""
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 8, 8, dtype=torch.float64, generator=generator)
    data, devices = [Batch.of((draw(), draw()))] * 3, [0, 1]
    placed = [piper.Place(piper.where(), devices), piper.Split("MB", 2)]
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    job = Job(Passing(), functional.mse_loss, Strategy(placed[:1]), Options(optimizer=sgd))

    whole, *sharded = (
        rehearsed(
            job.under(Strategy([*placed, piper.Replicate(piper.where(), devices, zero)])), data
        )
        for zero in range(4)
    )

    for found in sharded:
        torch.testing.assert_close(found.losses, whole.losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.parameters, whole.parameters, rtol=1e-12, atol=1e-12)


def test_memory_is_there_from_the_gather_until_it_is_released() -> None:
    buffer = GatherBuffer(4096, torch.device("cpu"))
    storage = buffer.flat.untyped_storage()
    views = buffer.views(GATHER, GROUP[0])

    assert storage.nbytes() == 0
    buffer.hold(gathered_bytes(GATHER))
    assert storage.nbytes() == gathered_bytes(GATHER) == 2 * 64
    views.messages[0].fill_(3)
    assert views.parameters[0].tolist() == [3.0] * 4, "views stay valid"
    buffer.release()
    assert storage.nbytes() == 0
