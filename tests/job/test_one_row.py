"""Microbatches of one row: what compares rows, or needs several, is not silently lost there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional
from trained_as_plain import assert_trains_as_plain

from piper import Place, Split, Strategy, rehearse, where
from piper.errors import CaptureError, InputError
from piper.strategies import gpipe

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ROWS = 8
EACH = Strategy([Place(where(), [0]), Split("MB", ROWS)])
Loss = Callable[[Tensor, Tensor], Tensor]


def others(o: Tensor) -> Tensor:
    return (o @ o.T)[~torch.eye(len(o), dtype=torch.bool)]


COMPARED: dict[str, Loss] = {
    "neighbours": lambda o, y: (o[1:] - o[:-1]).square().mean(),
    "neighbours and labels": lambda o, y: o.diff(dim=0).abs().mean() + (o - y).square().mean(),
    "distances": lambda o, y: (torch.pdist(o) - 1).square().mean(),
    "deviations": lambda o, y: (o - y).std(0).mean(),
    "variance": lambda o, y: o.var(0).mean() + (o - y).square().mean(),
    "other rows": lambda o, y: others(o).square().mean(),
    "each second row": lambda o, y: o[1::2].square().mean() + (o - y).square().mean(),
    "covariance": lambda o, y: torch.cov(o.T).square().mean(),
    "all but the first": lambda o, y: (o[1:] - y[1:]).square().mean(),
}
OF_ROWS: dict[str, Loss] = {
    "squares": lambda o, y: (o - y).square().mean(),
    "neighbouring features": lambda o, y: o.diff(dim=1).square().mean(),
    "a shift": lambda o, y: (o[:, 1:] - y[:, :-1]).square().mean(),
    "a sum": lambda o, y: (o - y).square().sum(),
    "by the size": lambda o, y: (o - y).square().sum() / o.numel(),
    "a mask": lambda o, y: ((o - y).abs() * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "deviations of features": lambda o, y: (o - y).std(1).mean(),
    "tokens": lambda o, y: functional.cross_entropy(o.view(-1, 3), y.argmax(1).view(-1)),
}


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(4, 3).double(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


class Beside(Own):
    """The number is one of two outputs."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = self.layer(x)
        return out, self.loss(out, y)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, width, generator=draw).double() for width in (4, 3))
    return x, y


@one_of(6)
@pytest.mark.parametrize("name", COMPARED)
def test_an_own_loss_that_compares_rows_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot see how it reduces over rows"):
        rehearse(Own(COMPARED[name]), None, EACH, [batch()], optimizer=SGD)


@one_of(8)
@pytest.mark.parametrize("given", [{"reduction": "mean"}, {"loss_weight": lambda *_: 1}], ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_it_is_warned_of_where_the_user_insists(
    name: str, given: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Own(COMPARED[name]), None, EACH, [batch()], optimizer=SGD, **given)

    assert "one microbatch and one replica" in caplog.text


@pytest.mark.parametrize("name", COMPARED)
def test_a_number_beside_other_outputs_is_warned_of(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(found: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return (found[0] - y).square().mean() + found[1]

    with caplog.at_level(logging.WARNING, "piper"):
        try:
            rehearse(Beside(COMPARED[name]), loss, EACH, [batch()], optimizer=SGD)
        except InputError:
            return

    assert "one microbatch and one replica" in caplog.text


@one_of(6)
@pytest.mark.parametrize("name", OF_ROWS)
def test_means_and_sums_of_each_row_are_seen(name: str) -> None:
    assert_trains_as_plain(
        lambda: Own(OF_ROWS[name]), EACH, [batch(seed) for seed in range(3)], SGD
    )


class OtherwiseForOne(nn.Module):
    """Models of transformers leave masks out where a batch has one row."""

    def __init__(self, weigh: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]).double() if weigh else None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x) if len(x) == 1 else self.layer(x) * torch.ones_like(x[..., :1])
        labels = functional.pad(y, (0, 1), value=-100)[:, 1:]  # the next token
        return functional.cross_entropy(out.flatten(0, 1), labels.flatten(), weight=self.weights)


@one_of(2)
@pytest.mark.parametrize("weigh", [False, True])
def test_labels_count_in_models_that_do_something_else_for_one_row(weigh: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, 4, generator=draw).double()
    y = torch.randint(3, (ROWS, 5), generator=draw)
    y = y.masked_fill(torch.rand(ROWS, 5, generator=draw) < 0.3, -100)

    assert_trains_as_plain(lambda: OtherwiseForOne(weigh), EACH, [(x, y)] * 3, SGD)


@pytest.mark.parametrize("part", [slice(1, None), slice(1, None, 3)])
def test_a_mean_over_no_row_of_a_microbatch_is_refused(part: slice) -> None:
    x, y = torch.randn(2, 8, 4).unbind()

    with pytest.raises(CaptureError, match="over no element for the rows of a microbatch"):
        rehearse(
            torch.nn.Linear(4, 4), lambda o, y: torch.nn.functional.mse_loss(o[part], y[part]),
            gpipe(1, 8), [(x, y)],
        )  # fmt: skip
