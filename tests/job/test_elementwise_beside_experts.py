"""Where devices divide experts, all regions that wait keep no results of cheap operators."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import Strategy, annotate, strategies
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.memory import elementwise_choice
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed
from piper.models.grouped import grouped_mm
from piper.plan.analyse.memory import peak

WIDTH, EXPERTS, ROWS, PARTS, WAYS = 6, 2, 8, 2, 2
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
KEPT = ROWS // PARTS // WAYS * WIDTH * 8  # an activation of a microbatch on a device


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise_choice, "LEAST", 1)


class Mixture(nn.Module):
    """A norm and a product, an expert for each row, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        linear = partial(nn.Linear, WIDTH, bias=False, dtype=torch.float64)
        self.dense, self.more, self.head = linear(WIDTH), linear(WIDTH), linear(WIDTH)
        self.router = linear(EXPERTS)
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.more(functional.layer_norm(self.dense(x), (WIDTH,)))
            order = self.router(x).argmax(-1).argsort(stable=True)
            counts = functional.one_hot(self.router(x).argmax(-1), EXPERTS).sum(0)
            rows = x[order]
        with annotate("EP"):
            rows = grouped_mm(rows, self.into, counts)
        with annotate("PP"):
            return self.head(torch.zeros_like(rows).index_copy(0, order, rows))


def strategy(**options: float) -> Strategy:
    return strategies.one_f_one_b(pp=1, microbatches=PARTS, dp=WAYS, ep=WAYS, **options)


@cache
def job() -> Job:
    return Job(Mixture(), functional.mse_loss, strategy(), Options(optimizer=ADAMW, device="cpu"))


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    rand = partial(torch.randn, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    return [(rand(), rand()) for _ in range(2)]


def test_a_norm_before_experts_is_not_kept_while_the_rest_goes_back() -> None:
    batch = job().rows.divided(Batch.of(batches()[0]))[0]
    lean, whole = (job().under(s).compile(batch)[1] for s in (strategy(), strategy(remat=1.0)))
    less, kept = (found.dag.model.by_id["PP0"] for found in (lean, whole))

    assert sum(s.nbytes for s in kept.saved) - sum(s.nbytes for s in less.saved) == KEPT
    held = (peak(found.dag, found.plans[0]).held["activations"] for found in (whole, lean))
    assert next(held) - next(held) == KEPT


def test_it_trains_as_plain_pytorch() -> None:
    found = rehearsed(job(), [Batch.of(one) for one in batches()])
    model = Mixture()
    optimizer = ADAMW(model.parameters())
    losses = plain_losses(optimizer, batches(), lambda x, y: functional.mse_loss(model(x), y))

    torch.testing.assert_close(found.losses, losses, rtol=1e-12, atol=0.0)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], tensor.detach(), rtol=1e-11, atol=1e-12)
