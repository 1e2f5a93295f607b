"""Layers that run in evaluation only: one stage takes them, several are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from draws import one_of
from evaluations import SGD, Threads, close
from torch import Tensor, nn
from torch.nn import functional as F

from piper.directives.strategy import as_strategy
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.strategies import gpipe

WIDTH = 6
ONE_STAGE = {
    "recomputed": gpipe(pp=1, microbatches=2, remat=True),
    "divided": gpipe(pp=1, microbatches=2, tp=2, remat=True),
}


class Repeats(nn.Module):
    """Runs its first layer once more in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.training else self.layers[0](x)


def devices(strategy: object) -> tuple[Threads, Batch]:
    options = Options(optimizer=SGD, device="cpu")
    job = Job(Repeats(), F.mse_loss, as_strategy(strategy), options)  # type: ignore[arg-type]
    x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = Batch.of((x, y))
    return Threads(job, [batch]), batch


@one_of(2)
@pytest.mark.parametrize("name", ONE_STAGE)
def test_one_stage_has_all_layers(name: str) -> None:
    threads, batch = devices(ONE_STAGE[name])
    model = Repeats().eval()
    model.load_state_dict(threads.train())
    with torch.no_grad():
        wanted = model(batch.tensors[0])

    close(threads.forward(Batch.of(batch.arguments[:1]), "outputs"), wanted)
    for found in threads.forward(batch, "loss"):
        assert found == pytest.approx(F.mse_loss(wanted, batch.tensors[1]).item(), rel=1e-12)


def test_several_stages_are_refused_with_the_reason() -> None:
    threads, batch = devices(gpipe(pp=2, microbatches=2))

    with pytest.raises(InputError, match="the model runs 4 layers here, and 3 in training"):
        threads.forward(batch, "loss")
