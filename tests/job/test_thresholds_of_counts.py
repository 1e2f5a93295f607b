"""Losses that decide by how many rows count: each microbatch would count its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.errors import InputError

ROWS, WIDTH = 8, 4
SGD = partial(torch.optim.SGD, lr=0.1)
SPLIT = [Place(where(), [0]), Split("MB", 2)]
Loss = Callable[[Tensor, Tensor], Tensor]  # of the losses of rows, and a mask


def mean(rows: Tensor, mask: Tensor) -> Tensor:
    return (rows * mask).sum() / mask.sum().clamp(min=1)


DECIDING: dict[str, Loss] = {
    "some": lambda rows, mask: torch.where(mask.sum() > 0, mean(rows, mask), 0.0),
    "some, not safe": lambda rows, mask: torch.where(
        mask.sum() > 0, (rows * mask).sum() / mask.sum(), 0.0
    ),
    "any": lambda rows, mask: torch.where(mask.bool().any(), mean(rows, mask), 0.0),
    "all": lambda rows, mask: torch.where(mask.bool().all(), rows.mean(), mean(rows, mask)),
    "none": lambda rows, mask: torch.where(mask.sum() == 0, rows.mean(), mean(rows, mask)),
    "three": lambda rows, mask: torch.where(mask.sum() >= 3, mean(rows, mask), rows.mean()),
    "many": lambda rows, mask: torch.where(mask.sum() > 100, 2 * rows.mean(), rows.mean()),
    "a factor": lambda rows, mask: mean(rows, mask) * (mask.sum() > 1),
    "a sum": lambda rows, mask: torch.where(mask.sum() > 1, (rows * mask).sum(), 0.0),
    "a share": lambda rows, mask: torch.where(mask.mean() < 0.5, 2 * rows.mean(), rows.mean()),
}
DIVIDING: dict[str, Loss] = {
    "at least one": mean,
    "or one": lambda rows, mask: (rows * mask).sum() / torch.where(mask.sum() > 0, mask.sum(), 1.0),
    "at least five": lambda rows, mask: (rows * mask).sum() / mask.sum().clamp(min=5),
}


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self.layer(x).square().mean(1), mask)


def data(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return x, torch.tensor([0, 0, 0, 0, 1, 0, 1, 1]).double()  # none in the first microbatch


def trained(loss: Loss, own: bool) -> tuple[float, ...]:
    model, batches = Own(loss), [data(1), data(2)]
    given = (model, None) if own else (model.layer, lambda o, m: loss(o.square().mean(1), m))
    return rehearse(*given, SPLIT, batches, optimizer=SGD).losses


@one_of(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", every(5, DECIDING))
def test_a_decision_by_a_count_is_refused_with_what_to_write(name: str, own: bool) -> None:
    with pytest.raises(InputError) as refused:
        trained(DECIDING[name], own)

    (problem,) = refused.value.problems
    assert "on how many rows of the batch count" in problem.what
    assert "mask.sum().clamp(min=1)" in problem.fix and "sum" not in problem.fix[:20]


@one_of(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", every(2, DIVIDING))
def test_what_to_write_trains_as_plain_pytorch_does(name: str, own: bool) -> None:
    model = Own(DIVIDING[name])
    right = plain_losses(SGD(model.parameters()), [data(1), data(2)], model)

    assert trained(DIVIDING[name], own) == pytest.approx(right, rel=1e-12)


def test_elements_that_a_mask_chooses_are_counted_when_the_graph_runs() -> None:
    def chosen(rows: Tensor, mask: Tensor) -> Tensor:
        return rows[mask.bool()].mean()

    model = Own(chosen)
    right = plain_losses(SGD(model.parameters()), [data(1), data(2)], model)

    found = rehearse(Own(chosen), None, SPLIT[:1], [data(1), data(2)], optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)
