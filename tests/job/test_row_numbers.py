"""Tensors of a batch that hold numbers of its rows, as graphs with flat nodes do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where
from piper.errors import InputError, RunError

NODES, WIDTH = 8, 4
Message = Callable[[Tensor, Tensor], Tensor]  # of nodes, and where each gets its message from
SPLIT = [Place(where(), [0]), Split("MB", 2)]
REPLICAS = [Place(where(), [0, 1]), Replicate(where(), [0, 1])]


def wide(rows: Tensor) -> Tensor:
    return rows[:, None].expand(-1, WIDTH)


MESSAGES: dict[str, Message] = {
    "index": lambda h, source: h + h[source],
    "index_select": lambda h, source: h + h.index_select(0, source),
    "gather": lambda h, source: h + h.gather(0, wide(source)),
    "embedding": lambda h, source: h + F.embedding(source, h),
    "scatter_add": lambda h, source: h.scatter_add(0, wide(source), h),
    "index_add": lambda h, source: h.index_add(0, source, h),
    "a new tensor": lambda h, source: h + torch.zeros_like(h).index_add(0, source, h) / 2,
}
FORMS = {
    f"{name}, {way}": (message, strategy)
    for name, message in MESSAGES.items()
    for way, strategy in (("split", SPLIT), ("replicas", REPLICAS))
}


class Graph(nn.Module):
    def __init__(self, message: Message) -> None:
        super().__init__()
        self.layer, self.message = nn.Linear(WIDTH, WIDTH), message

    def forward(self, nodes: Tensor, source: Tensor) -> Tensor:
        return self.message(torch.tanh(self.layer(nodes)), source)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    nodes, wanted = torch.randn(2, NODES, WIDTH, generator=torch.Generator().manual_seed(1))
    return nodes, torch.arange(NODES).roll(1), wanted


@one_of(2)
@pytest.mark.parametrize(("message", "strategy"), every(5, FORMS.values(), FORMS))
def test_row_numbers_of_other_microbatches_are_refused_in_words(
    message: Message, strategy: list[Place | Replicate | Split]
) -> None:
    with pytest.raises(InputError) as caught:
        rehearse(Graph(message), F.mse_loss, strategy, [batch()])

    (problem,) = caught.value.problems
    assert "has 4 rows, and test_row_numbers.py" in problem.what
    assert "make each graph one row" in problem.fix


class Mixup(nn.Module):
    """Labels of partners, whose numbers are in the batch; some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor, partner: Tensor) -> Tensor:
        output = self.layer(x)
        return F.cross_entropy(output, labels) + F.cross_entropy(output, labels[partner])


@pytest.mark.parametrize("strategy", [SPLIT, REPLICAS], ids=["split", "replicas"])
def test_labels_of_other_microbatches_are_refused_in_words(
    strategy: list[Place | Replicate | Split],
) -> None:
    labels = torch.arange(NODES) % 3
    data = torch.randn(NODES, WIDTH), labels, torch.arange(NODES).roll(1)

    with pytest.raises(InputError, match="has 4 rows, and counting labels") as caught:
        rehearse(Mixup(), None, strategy, [data])

    assert "under mixup, give the rows of the partners" in str(caught.value)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NODES // 2, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words)


def test_an_index_beyond_a_table_is_an_error_of_the_step() -> None:
    words = torch.full((NODES,), NODES // 2)

    with pytest.raises(RunError, match="index out of range"):
        rehearse(Words(), F.mse_loss, SPLIT, [(words, torch.zeros(NODES, WIDTH))])
