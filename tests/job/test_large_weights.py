"""Models with more parameters than a trial may copy are tried with other values for matrices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.trace.trials.windows import Window
from piper.job.loss import trial_size

WIDTH, TIME = 32, 4
Form = Callable[[Tensor], Tensor]  # of [rows, time, width]


def at(places: Callable[[int], Tensor]) -> Form:
    """Tokens in another order."""
    return lambda h: h.flatten(0, 1)[places(len(h))].view_as(h)


def by_turns(h: Tensor) -> Tensor:
    return h.transpose(0, 1).reshape(-1, WIDTH)


WRONG: dict[str, Form] = {
    "as many rows as tokens": at(lambda rows: torch.arange(rows).repeat(TIME)),
    "a wrong stride": at(lambda rows: (torch.arange(rows) * 2).repeat_interleave(TIME)),
    "an offset too many": at(lambda rows: (torch.arange(rows * TIME) + 2) % (rows * TIME)),
    "the token before": at(lambda rows: torch.arange(rows * TIME) - 1),
    "in turn, and back row by row": lambda h: by_turns(h).tanh().view_as(h),
    "repeated in turn": lambda h: h[:, 0].repeat(TIME, 1).view_as(h),
    "two orders": lambda h: (h.flatten(0, 1) + by_turns(h)).view_as(h),
    "shifted": lambda h: h.flatten(0, 1).roll(1, 0).view_as(h),
    "taken": lambda h: h.take(torch.arange(h.numel()).view(WIDTH, -1).T).view_as(h),
    "random, and places": lambda h: (
        h + (torch.rand(()) + torch.linspace(0, 1, len(h) + 1)[:-1])[:, None, None]
    ),
    "the mean": lambda h: h - h.mean(0),
    "attention over rows": lambda h: F.scaled_dot_product_attention(*3 * [h.transpose(0, 1)])
    .transpose(0, 1),
}  # fmt: skip
RIGHT: dict[str, Form] = {
    "as many": at(lambda rows: torch.arange(rows).repeat_interleave(TIME) * TIME),
    "all in order": at(lambda rows: torch.arange(rows * TIME)),
    "in turn and back": lambda h: by_turns(h).tanh().view(TIME, -1, WIDTH).transpose(0, 1),
    "repeated": lambda h: h[:, 0].repeat_interleave(TIME, 0).view_as(h),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "sorted and back": lambda h: h[h[:, 0, 0].argsort()].tanh()[
        h[:, 0, 0].argsort().argsort()
    ],
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, WIDTH)
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 50)
        self.form = form

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.form(self.layer(self.table(ids)))).mT


def messages(form: Form, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> str:
    monkeypatch.setattr(trial_size, "OWN_VALUES", 0)
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)
    ids = torch.randint(50, (8, TIME), generator=torch.Generator().manual_seed(1))
    with log.at_level(logging.WARNING, "piper"):
        rehearse(Net(form), F.cross_entropy, [Place(where(), [0]), Split("MB", 2)], [(ids, ids)])
    return log.text


@one_of(12)
@pytest.mark.parametrize("name", WRONG)
def test_rows_that_meet_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "test_large_weights.py" in messages(WRONG[name], monkeypatch, caplog)


@one_of(6)
@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_do_not_meet_need_no_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not messages(RIGHT[name], monkeypatch, caplog)


@pytest.mark.parametrize("shape", [(50, 40), (64, 8, 7, 7), (16, 64, 32)], ids=str)
def test_a_window_has_other_rows_and_columns(shape: tuple[int, ...]) -> None:
    window = Window("weight", shape, torch.float32)
    found = window.values(torch.float64)

    assert window.saves and found.dtype == torch.float64 and found.shape == shape
    assert found.untyped_storage().nbytes() <= 8 * prod(shape) / 4
    for dim in range(len(shape)):
        rows = found.movedim(dim, 0).flatten(1)
        assert len(rows.unique(dim=0)) == len(rows)
    assert not found.equal(Window("other", shape, torch.float32).values(torch.float64))


def test_the_matrices_of_a_large_model_take_hardly_any_memory() -> None:
    assert Window("weight", (8192, 28672), torch.bfloat16).numbers < 60_000


def test_vectors_and_small_matrices_have_their_own_values() -> None:
    assert not any(Window("w", shape, torch.float32).saves for shape in [(), (9999,), (4, 4)])
