"""Ids that are made from the place of a row, only to address its own piece of a flat tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where

SGD = partial(torch.optim.SGD, lr=0.1)


class Bags(nn.Module):
    """As recommenders look up several ids of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(9, 6, mode="max"), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Any:
        rows, many = ids.shape
        return self.last(self.bag(ids.reshape(-1), torch.arange(0, rows * many, many)))


class Graphs(nn.Module):
    """Nodes of all graphs in one tensor; edges name them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Any:
        rows, many = ids.shape
        first = (torch.arange(rows) * many).view(rows, 1)
        ends = (ids % many + first).reshape(-1), (ids // 2 % many + first).reshape(-1)
        nodes = self.table(ids).reshape(rows * many, -1)
        found = torch.zeros_like(nodes).index_add_(0, ends[1], nodes[ends[0]])
        return self.last(found.view(rows, many, -1).amax(1))


class Once(nn.Module):
    """Each id is looked up once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Any:
        found, places = torch.unique(ids, return_inverse=True)
        return self.last(self.table(found)[places].mean(1))


class Placed(nn.Module):
    """Here, the place of a row matters."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Any:
        return self.last(self.table(ids).mean(1) + 0.1 * torch.arange(len(ids))[:, None])


class Periodic(Placed):
    """It has the period of the first microbatch, of three rows; the others have two."""

    def forward(self, ids: Tensor) -> Any:
        factor = 1 + torch.arange(len(ids)) % 3
        return self.last(self.table(ids).mean(1) * factor[:, None])


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """The second one is ragged: three microbatches of three, two and two rows."""
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(9, (rows, 4), generator=draw),
            torch.randn(rows, 1, generator=draw, dtype=torch.float64),
        )
        for rows in (6, 7, 6)
    ]


def trained(
    kind: type[nn.Module], given_batches: list[tuple[Tensor, Tensor]] | None = None
) -> list[float]:
    every = given_batches or batches()
    given: dict[str, Any] = {"example": every[0], "optimizer": SGD, "device": "cpu"}
    with Trainer(made(kind), F.mse_loss, [Place(where(), [0]), Split("MB", 3)], **given) as trainer:
        return [float(trainer.step(*batch).loss) for batch in every]


@pytest.mark.parametrize("kind", [Bags, Graphs, Once])
def test_they_train_as_in_plain_pytorch_without_a_warning(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = made(kind)
    wanted = plain_losses(SGD(model.parameters()), batches(), lambda x, y: F.mse_loss(model(x), y))

    assert trained(kind) == pytest.approx(wanted, rel=1e-12)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize("kind", [Placed, Periodic])
def test_a_place_that_matters_is_warned_of(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """In the ragged batch alone: microbatches of two rows each would show the period."""
    trained(kind, [batches()[1]])

    assert "rows of the batch meet" in caplog.text or "the place of a row" in caplog.text
