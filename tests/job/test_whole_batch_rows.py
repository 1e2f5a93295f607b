"""Python code that branches on the number of rows: between a microbatch and the whole batch."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from draws import drawn, draws, every
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where
from piper.capture.trace.row_calls.recorded_calls import RowCounts
from piper.errors import PiperError
from piper.job.loss import trial_size

TOKENS, WIDTH = 3, 4
SGD = partial(torch.optim.SGD, lr=0.1)
Form = Callable[[Tensor, int], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
SIZES = [(2, 4, 1), (1, 8, 1), (2, 3, 2), (3, 4, 1), (1, 2, 4)]  # rows, microbatches, replicas


def without_gradients(h: Tensor, k: int) -> Tensor:
    with torch.no_grad() if len(h) > k else nullcontext():
        extra = h.sin()
    return h + extra


FORMS: dict[str, Form] = {  # none of them lets rows meet
    "an if": lambda h, k: h * 2 if len(h) > k else h,
    "another function": lambda h, k: h.relu() if h.numel() > k * TOKENS * WIDTH else h.tanh(),
    "at most": lambda h, k: h * min(len(h), k),
    "at least": lambda h, k: h * max(h.shape[0], k),
    "what is left": lambda h, k: h + (h.shape[0] % k == 0),
    "divided": lambda h, k: h * (1 + h.size(0) // k),
    "the first rows": lambda h, k: torch.cat([h[:k].tanh(), h[k:]]),
    "filled": lambda h, k: h.index_fill(0, torch.arange(min(k, len(h))), 0.0),
    "a loop": lambda h, k: torch.stack([h[i] * (2 if i > k else 1) for i in range(len(h))]),
    "a type": lambda h, k: (h.float() if len(h) > k else h.bfloat16()).to(h.dtype),
    "detached": lambda h, k: h + (h.detach() if len(h) > k else h),
    "no gradients": without_gradients,
    "dropout": lambda h, k: F.dropout(h, 0.1 if len(h) > k else 0.5),
    "numpy": lambda h, k: h * torch.from_numpy(numpy.array([1.0 + (len(h) < k)])).to(h.dtype),
    "an array": lambda h, k: h * torch.as_tensor(numpy.full(WIDTH, 1.0 + (len(h) < k))).to(h),
    "a tensor": lambda h, k: h * torch.tensor(float(len(h) > k) + 1, dtype=h.dtype),
    "an option": lambda h, k: F.layer_norm(h, (WIDTH,), eps=1e-5 if len(h) > k else 1.0),
    "wiring": lambda h, k: (h.sin() if len(h) < k else h) + (h if len(h) < k else h.sin()) * 2,
    "in pieces": lambda h, k: torch.cat([part.tanh() for part in h.split(k)]),
    "padded": lambda h, k: torch.cat([h, h[: max(0, k - len(h))]])[: len(h)].tanh(),
    "two sizes": lambda h, k: h * (2 if len(h) < k else 8),
}
LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "an if": lambda out, y, k: F.mse_loss(out, y) * (2 if len(y) > k else 1),
    "another loss": lambda out, y, k: (F.l1_loss if len(y) > k else F.mse_loss)(out, y),
    "first rows": lambda out, y, k: F.mse_loss(out[:k], y[:k]),
    "divided": lambda out, y, k: F.mse_loss(out, y, reduction="sum") / min(len(y), k),
}


class Net(nn.Module):
    def __init__(self, form: Form, least: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form, self.least = form, least
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.form(self.first(x), self.least))


def data(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, TOKENS, WIDTH, generator=draw, dtype=torch.float64)


def trained(model: nn.Module, loss: Loss, size: tuple[int, int, int]) -> None:
    rows, parts, replicas = size
    x = data(rows * parts * replicas)
    devices = list(range(replicas))
    strategy: list[Any] = [Place(where(), devices), Split("MB", parts)]
    strategy += [Replicate(where(), devices)] if replicas > 1 else []
    rehearse(model, loss, strategy, [(x, x)], optimizer=SGD)


def gradient(model: nn.Module, loss: Loss, x: Tensor, parts: int) -> Tensor:
    """By a plain loop, with the mean of so many parts. Dropout is left out."""
    for part in x.chunk(parts):
        (loss(model(part), part) / parts).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def is_the_same(form: Form, least: int, loss: Loss, size: tuple[int, int, int]) -> bool:
    """Whether microbatches and the whole batch have the same gradients in plain PyTorch."""
    rows, parts = size[0], size[1] * size[2]
    if form is FORMS["dropout"]:  # its numbers are random, so judge by its probability
        return (rows > least) == (rows * parts > least)
    found = [gradient(Net(form, least), loss, data(rows * parts), n) for n in (1, parts)]
    return torch.allclose(*found, rtol=1e-9, atol=1e-12)


@drawn
@pytest.mark.parametrize("is_large", [False, True])
def test_code_that_branches_on_the_number_of_rows_gets_a_warning(
    is_large: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Small models are tried on numbers. Of large ones, calls are compared: a loop over rows calls
    more for more rows, so they may be warned of without need. So may rows behind others, where a
    microbatch is one row: its random numbers are too few to show that they keep their places."""
    caplog.set_level(logging.WARNING, "piper")
    monkeypatch.setattr(trial_size, "LIMIT", 0 if is_large else trial_size.LIMIT)
    draw = random.Random(5)
    for _ in range(draws(5, 100)):
        name, size, least = draw.choice(list(FORMS)), draw.choice(SIZES), draw.randint(2, 9)
        caplog.clear()
        trained(Net(FORMS[name], least), F.mse_loss, size)

        said = "accumulates gradients" in caplog.text
        same = is_the_same(FORMS[name], least, F.mse_loss, size)
        looped = is_large and name in ("a loop", "in pieces")
        looped = looped or (name == "padded" and (is_large or size[0] == 1))
        assert said != same or (said and looped), f"{name} {size} {least}: {caplog.text}"


@pytest.mark.parametrize("loss", every(2, LOSSES.values(), LOSSES))
def test_a_loss_that_branches_on_the_number_of_rows_is_refused_or_warned_of(
    loss: Callable[[Tensor, Tensor, int], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "piper")
    try:
        trained(Net(lambda h, _: h, 0), lambda out, y: loss(out, y, 5), (2, 4, 1))
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "accumulates gradients" in caplog.text


def test_the_line_of_a_branch_in_a_large_model_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "piper")
    monkeypatch.setattr(trial_size, "LIMIT", 0)
    form = FORMS["an if"]
    trained(Net(form, 5), F.mse_loss, (2, 4, 1))

    at = form.__code__.co_firstlineno
    assert f"a microbatch (test_whole_batch_rows.py:{at})" in caplog.text
    assert "with the 8 rows of the whole batch" in caplog.text


def test_microbatches_of_all_sizes_are_compared_with_the_whole_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one is on the same side of the branch as the whole batch."""
    caplog.set_level(logging.WARNING, "piper")
    strategy = [Place(where(), [0]), Split("MB", 2, sizes=(6, 2))]
    rehearse(Net(FORMS["an if"], 5), F.mse_loss, strategy, [(data(8), data(8))], optimizer=SGD)

    assert "with the 8 rows of the whole batch" in caplog.text


def test_sizes_follow_rows_and_other_numbers_do_not() -> None:
    rows = RowCounts(2, 8)

    assert rows.follows(2, 8) and rows.follows(6, 24) and rows.follows(3, 9) and rows.follows(1, 4)
    assert not rows.follows(2, 6) and not rows.follows(6, 8) and not rows.follows(2.0, 8.0)
    assert rows.is_scaled(2.0, 8.0) and rows.is_scaled(0.5, 0.125) and not rows.is_scaled(2.0, 6.0)
