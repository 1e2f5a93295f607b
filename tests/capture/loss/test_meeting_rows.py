"""A model in which rows meet is known by the line where they do. Others are left in peace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.loss import meeting_rows
from piper.capture.trace.forward import loss_graph, trace
from piper.models import qwen3_moe

ROWS, TOKENS, WIDTH = 4, 3, 8  # the number of rows divides the width: sizes show nothing
Mix = Callable[[Tensor], Tensor]
Loss = Callable[[Any, Tensor], Tensor]

MEETING: dict[str, tuple[str, Mix]] = {
    "centred": ("mean", lambda x: x - x.mean(0)),
    "softmax": ("softmax", lambda x: x.softmax(0) * x),
    "normalised": ("mean", lambda x: (x - x.mean(0)) / x.std(0)),
    "scaled": ("std", lambda x: x / x.std(0)),
    "products": ("matmul", lambda x: x @ (x.flatten(0, 1).T @ x.flatten(0, 1))),
    "running": ("cumsum", lambda x: x.cumsum(0)),
    "largest": ("amax", lambda x: x / x.amax(0)),
    "tokens": ("mean", lambda x: x - x.mean((0, 1))),
    "of everything": ("sum", lambda x: x * x.sum()),
}
APART: dict[str, Mix] = {
    "linear": lambda x: x.tanh(),
    "layer norm": lambda x: F.layer_norm(x, [WIDTH]),
    "own mean": lambda x: x - x.mean(1, keepdim=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: (x @ x.mT).softmax(-1) @ x,
    "batch norm": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "flat": lambda x: x.flatten(0, 1).softmax(-1).unflatten(0, (-1, TOKENS)),
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(WIDTH, WIDTH, 3), padding=1).mT,
    "count": lambda x: x * (x > 0).sum().gt(-1),
    "a loop": lambda x: torch.stack([row.softmax(0) * row for row in x.mT]).mT,
    "a loop by numbers": lambda x: (
        torch.stack([x.mT[k] / x.mT[k].std(0) for k in range(len(x))]).mT
    ),
    "a loop, joined": lambda x: torch.cat([row.cumsum(0)[None] for row in x.mT.unbind(0)]).mT,
    "a loop in another place": lambda x: (
        torch.stack([row.T.softmax(0) for row in x], 1).permute(1, 2, 0) * x
    ),
    "padded": lambda x: nn.utils.rnn.pad_sequence(list(x), batch_first=True).softmax(1),
    "padded, time first": lambda x: nn.utils.rnn.pad_sequence(list(x)).transpose(0, 1),
    "padded columns": lambda x: (
        nn.utils.rnn.pad_sequence([x[:, :2, k].T for k in range(WIDTH)], batch_first=True)
        .softmax(0)
        .permute(2, 1, 0)
        .repeat(1, 2, 1)[:, :TOKENS]
    ),
    "guessed": lambda x: (
        torch.cdist(x[:, None], x[:, None]).movedim(0, 2).mean(0)[0, :, 0, None, None] + x
    ),
}
LOOPS: dict[str, tuple[str, Mix]] = {
    "after a loop": (
        "mean",
        lambda x: (lambda y: y - y.mean(0))(torch.stack([r.tanh() for r in x])),
    ),
    "after padding": ("softmax", lambda x: nn.utils.rnn.pad_sequence(list(x), True).softmax(0)),
}
MEETING |= LOOPS


class Net(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.mix(self.layers[0](x)))


def found(model: nn.Module, loss: Loss = F.mse_loss) -> str:
    x = torch.randn(ROWS, TOKENS, WIDTH)
    return meeting_line(model, loss, (x, x))


def meeting_line(model: nn.Module, loss: Any, example: tuple[Tensor, ...]) -> str:
    again = partial(loss_graph, model, device="cpu", precision=None, loss_fn=loss)
    return meeting_rows(trace(model, loss, example, "cpu"), again)


@pytest.mark.parametrize(("name", "mix"), every(4, MEETING.values(), MEETING))
def test_the_line_is_named(name: str, mix: Mix) -> None:
    at = mix.__code__.co_firstlineno

    assert found(Net(mix)) == f"test_meeting_rows.py:{at} (aten.{name})"


@pytest.mark.parametrize("mix", every(4, APART.values(), APART))
def test_rows_that_stay_apart_are_left_in_peace(mix: Mix) -> None:
    assert found(Net(mix)) == ""


LOSSES: dict[str, Loss] = {
    "masked": lambda o, y: ((o - y) * (y > 0)).sum() / (y > 0).sum(),
    "divided first": lambda o, y: ((o - y) / y.square().sum()).sum(),
    "cross entropy": lambda o, y: F.cross_entropy(o.flatten(0, 1), y[..., 0].long().flatten()),
    "sum": lambda o, y: F.mse_loss(o, y, reduction="sum") + 0.1 * o.mean(0).square().sum(),
}


@pytest.mark.parametrize("loss", every(2, LOSSES.values(), LOSSES))
def test_losses_are_judged_elsewhere(loss: Loss) -> None:
    assert found(Net(torch.tanh), loss) == ""


def test_mixtures_and_batch_norms_are_ordinary() -> None:
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    mixture = qwen3_moe.Qwen3Moe(qwen3_moe.Qwen3MoeConfig(layers=1))
    norm = nn.Sequential(nn.BatchNorm1d(TOKENS), nn.BatchNorm1d(TOKENS, momentum=None))

    assert meeting_line(mixture, qwen3_moe.moe_loss, (tokens, tokens)) == ""
    assert found(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)) == ""


class Windows(nn.Module):
    """Those of all images are the rows of an attention: their number has nothing to do with that
    of the features, and may be the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mixing = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (4, 2)).flatten(0, 1)
        mixed = windows + self.attention(windows, windows, windows, need_weights=False)[0]
        return (mixed + self.mixing(mixed)).view_as(x)


@one_of(6)
@pytest.mark.parametrize("width", [2, 4, 6, 8, 12, 16, 24, 32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_sizes_that_are_equal_by_chance_need_no_warning(rows: int, width: int) -> None:
    x = torch.randn(rows, 8, width)

    assert meeting_line(Windows(width), F.mse_loss, (x, x)) == ""


@pytest.mark.parametrize("parts", [1, 2])
def test_several_microbatches_get_a_warning(parts: int, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(ROWS, TOKENS, WIDTH)
    strategy = [Place(where(), [0]), Split("MB", parts)]

    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(MEETING["centred"][1]), F.mse_loss, strategy, [(x, x)])

    assert ("rows of the batch meet at test_meeting_rows.py" in caplog.text) == (parts > 1)
