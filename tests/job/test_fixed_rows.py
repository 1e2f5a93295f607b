"""Models for one number of rows, and lists with an entry for each row: microbatches have fewer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, rehearse, where
from piper.errors import CaptureError, InputError
from piper.strategies import one_f_one_b

ROWS, WIDTH = 8, 4
SGD = partial(torch.optim.SGD, lr=0.1)
SPLIT = one_f_one_b(pp=1, microbatches=2)
TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Changed(nn.Module):
    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.change(self.linear(x), *more)


def filled(h: Tensor) -> Tensor:
    found = torch.zeros(ROWS, WIDTH)
    for k in range(ROWS):
        found[k] = h[k]
    return found


FIXED = {
    "view": lambda h: h.view(ROWS, 2, 2).sum(1),
    "reshape": lambda h: h.reshape(ROWS, -1),
    "added": lambda h: h + TABLE,
    "filled": filled,
    "expanded": lambda h: h.sum(0).expand(ROWS, WIDTH) + h.expand(ROWS, WIDTH),
    "selected": lambda h: h[ROWS - 1] + h,
    "unbound": lambda h: torch.stack([h.unbind()[k] for k in range(ROWS)]),
    "joined": lambda h: torch.cat([h, TABLE], 1)[:, :WIDTH],
}


def batches(*more: Any) -> list[Any]:
    torch.manual_seed(2)
    return [(torch.randn(ROWS, WIDTH), *more, torch.randn(ROWS, WIDTH)) for _ in range(2)]


def loss(output: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(output, wanted[:, : output.shape[1]])


@one_of(2)
@pytest.mark.parametrize("name", FIXED)
def test_models_for_one_number_of_rows_are_refused_in_words(name: str) -> None:
    with pytest.raises(InputError, match="with the 8 rows of the batch, but not with the 4 of a"):
        rehearse(Changed(FIXED[name]), loss, SPLIT, batches(), optimizer=SGD)


def test_a_loss_for_one_number_of_rows_and_replicas() -> None:
    def flat(output: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(output.view(ROWS * WIDTH), wanted.flatten())

    replicas = [Place(where(), devices=[0, 1]), Replicate(where(), devices=[0, 1])]
    with pytest.raises(InputError, match=r"x\.shape\[0\] in place of a number"):
        rehearse(Changed(torch.tanh), flat, replicas, batches(), optimizer=SGD)


def test_one_microbatch_may_have_them_all() -> None:
    model = Changed(FIXED["view"])
    found = rehearse(model, loss, one_f_one_b(pp=1, microbatches=1), batches(), optimizer=SGD)
    assert found.losses == pytest.approx(plain(model, batches()), rel=1e-6)


def test_a_model_that_never_runs_fails_as_it_does_without_piper() -> None:
    with pytest.raises(CaptureError, match="RuntimeError: shape '\\[9"):
        rehearse(Changed(lambda h: h.view(9, -1)), loss, SPLIT, batches(), optimizer=SGD)


def plain(model: nn.Module, given: list[Any]) -> list[float]:
    def loss_of(*one: Any) -> Tensor:
        return loss(model(*one[:-1]), one[-1])

    return plain_losses(SGD(model.parameters()), given, loss_of)


def by_length(h: Tensor, lengths: Any) -> Tensor:
    """`zip` ends with the shorter one: rows would get entries of others."""
    return torch.stack([row * len(str(length)) for row, length in zip(h, lengths, strict=False)])


LISTS = {
    "numbers": ([1, 22, 333, 1, 22, 333, 1, 22], "torch.tensor"),
    "texts": (list("abcdefgh"), "token ids"),
    "a tuple": (tuple("abcdefgh"), "token ids"),
    "pairs": ([(k, k + 1) for k in range(ROWS)], "a row for each"),
    "with None": ([None, *range(ROWS - 1)], "a row for each"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_with_an_entry_for_each_row_are_refused(name: str) -> None:
    given, fix = LISTS[name]
    with pytest.raises(InputError, match=f"lengths is a (list|tuple) of 8[^$]*{fix}"):
        rehearse(Listed(), loss, SPLIT, batches(given), optimizer=SGD)


class Listed(Changed):
    def __init__(self) -> None:
        super().__init__(by_length)

    def forward(self, x: Tensor, lengths: Any) -> Tensor:  # type: ignore[override]
        return self.change(self.linear(x), lengths)


class Scaled(Listed):
    def forward(self, x: Tensor, lengths: Any) -> Tensor:  # type: ignore[override]
        return self.linear(x) * sum(lengths)


@pytest.mark.parametrize(("given", "whole"), [([1, 2, 3], None), (list(range(ROWS)), ["lengths"])])
def test_lists_that_all_rows_share_stay(given: list[int], whole: list[str] | None) -> None:
    model = Scaled()
    found = rehearse(model, loss, SPLIT, batches(given), optimizer=SGD, whole=whole)
    assert found.losses == pytest.approx(plain(model, batches(given)), rel=1e-5)


def test_a_list_beside_one_microbatch_is_that_of_its_rows() -> None:
    model, given = Listed(), LISTS["numbers"][0]
    single = one_f_one_b(pp=1, microbatches=1)
    found = rehearse(model, loss, single, batches(given), optimizer=SGD)
    assert found.losses == pytest.approx(plain(model, batches(given)), rel=1e-6)


class Halves(nn.Module):
    """Fails with one row, as many as a microbatch of a later replica has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 0)
        return torch.cat([self.first(one), self.last(other)])


def test_a_later_microbatch_with_which_a_model_does_not_run_is_refused() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    strategy = one_f_one_b(pp=1, dp=2, microbatches=2, replica_sizes=[3, 5])

    with pytest.raises(InputError, match="not with the 1 of a microbatch: ValueError"):
        rehearse(Halves(), nn.functional.cross_entropy, strategy, [(x, y)])


class TimeFirst(nn.Module):
    """It takes times that all rows share, and stacks what it computes for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        found = [x]
        for k in range(4):
            found.append(found[-1] + self.layer(found[-1]) * (times[k + 1] - times[k]))
        return torch.stack(found)


def test_times_that_are_taken_for_rows_are_named() -> None:
    example = torch.ones(8, 3), torch.arange(5.0), torch.ones(5, 8, 3)

    with pytest.raises(InputError) as found:
        rehearse(TimeFirst(), F.mse_loss, SPLIT, [example])

    assert "If these are not the rows (times cut, x and labels not), give" in str(found.value)
    assert str(found.value).endswith("name what all rows share: whole=[...]")
