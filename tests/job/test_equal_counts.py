"""Terms of a loss that divide by one count, written in different ways: they have one weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from trained_as_plain import assert_trains_as_plain

from piper import Place, Replicate, Split, Strategy, rehearse, where
from piper.errors import InputError

ROWS, LENGTH, WIDTH, WORDS = 8, 5, 4, 7
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Term = Callable[[Tensor, Tensor], Tensor]  # of scores for each token, and labels


def penalty(o: Tensor) -> Tensor:
    return o.logsumexp(-1).square()


def tokens(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten())


def masked(o: Tensor, m: Tensor) -> Tensor:
    return (penalty(o) * m).sum() / m.sum()


def as_numbers(o: Tensor, y: Tensor) -> Tensor:
    m = (y != -100).to(o.dtype)
    return masked(o, m)


def flat(o: Tensor, y: Tensor) -> Tensor:
    m = y.reshape(-1).ne(-100)
    return (penalty(o).flatten() * m).sum() / m.sum()


TERMS: dict[str, Term] = {
    "mask": lambda o, y: masked(o, y != -100),
    "numbers": as_numbers,
    "flat": flat,
    "not equal": lambda o, y: masked(o, ~(y == -100)),
    "at least one": lambda o, y: (penalty(o) * (y != -100)).sum() / (y != -100).sum().clamp(min=1),
    "chosen": lambda o, y: penalty(o)[y != -100].mean(),
    "classes first": lambda o, y: F.cross_entropy(o.transpose(1, 2) * 2, y),
    "again": lambda o, y: tokens(o * 0.5, y) + tokens(o * 0.3, y),
}
STRATEGIES: dict[str, Strategy] = {
    "halves": Strategy([Place(where(), [0]), Split("MB", 2)]),
    "unequal": Strategy([Place(where(), [0]), Split("MB", 2, sizes=[3, 1])]),
    "replicas": Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)]),
}


class Decoder(nn.Module):
    def __init__(self, term: Term) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.term = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), term
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.embed(x)))
        return tokens(scores, y) + 0.1 * self.term(scores, y)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=draw)
    ignored = torch.rand(ROWS, LENGTH, generator=draw) < 0.4
    return x, torch.where(ignored, -100, y)


WAYS = [(term, one) for term in TERMS for one in STRATEGIES]


@one_of(4)
@pytest.mark.parametrize(("term", "strategy"), every(4, WAYS))
def test_terms_with_one_count_train_as_in_plain_pytorch(term: str, strategy: str) -> None:
    make, batches = partial(Decoder, TERMS[term]), [data(seed) for seed in range(3)]

    assert_trains_as_plain(make, STRATEGIES[strategy], batches, SGD)


OTHERS: dict[str, Term] = {
    "all tokens": lambda o, y: penalty(o).mean(),
    "other labels": lambda o, y: masked(o, y > 0),
    "one more": lambda o, y: (penalty(o) * (y != -100)).sum() / ((y != -100).sum() + 1),
    "at most": lambda o, y: (penalty(o) * (y != -100)).sum() / (y != -100).sum().clamp(max=20),
    "squares": lambda o, y: (penalty(o) * (y != -100)).sum() / ((y != -100) * 2).square().sum(),
}


@one_of(2)
@pytest.mark.parametrize("term", OTHERS)
def test_terms_with_different_counts_have_no_common_weight(term: str) -> None:
    with pytest.raises(InputError, match="no single weight is right"):
        rehearse(Decoder(OTHERS[term]), None, STRATEGIES["halves"], [data(1)], optimizer=SGD)


def test_a_microbatch_without_labels_is_refused_where_a_term_may_count_others() -> None:
    x, y = data(1)
    y[: ROWS // 2] = -100

    with pytest.raises(InputError, match="microbatch 0 has weight 0"):
        rehearse(Decoder(TERMS["at least one"]), None, STRATEGIES["halves"], [(x, y)])
