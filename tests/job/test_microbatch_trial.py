"""Models whose microbatches do not add up to the batch: a trial on numbers names the line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from piper import Place, Split, rehearse, where
from piper.capture.trace.trials.trial_run import TrialRuns
from piper.errors import InputError
from piper.job.loss import trial_size

ROWS, TOKENS, WIDTH = 2, 3, 4
Mix = Callable[[Tensor], Any]
SGD = partial(torch.optim.SGD, lr=0.1)
CALLS: list[int] = []

MEETING: dict[str, Mix] = {  # what the graph does not prove
    "a number": lambda h: h * h.shape[0],
    "its root": lambda h: h / len(h) ** 0.5,
    "in a sum": lambda h: h + 0.1 * h.size(0),
    "filled": lambda h: h + h.new_full((len(h), 1, 1), float(len(h))),
    "positions": lambda h: h + torch.arange(len(h), dtype=h.dtype)[:, None, None],
    "first row": lambda h: h - h[:1],
    "sorted": lambda h: h.sort(0).values,
    "mixed up": lambda h: h + h[torch.arange(len(h)).flip(0)],
    "permuted": lambda h: h + h[torch.randperm(len(h))],
    "largest": lambda h: h / h.abs().max(),
    "attention": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "joined": lambda h: torch.cat([h, h + h.max()])[len(h) :],
    "a loop": lambda h: torch.stack([row * len(h) for row in h]),
    "ordered by chance": lambda h: h + h[torch.rand(len(h)).argsort()],
    "sorted by chance": lambda h: h + h[torch.randn(len(h), 1).sort(0).indices[:, 0]],
    "best of chances": lambda h: h + h[torch.rand(len(h)).topk(len(h)).indices],
    "half of the rows": lambda h: h * (torch.rand(len(h)).argsort() < 1)[:, None, None],
    "the largest chance": lambda h: h * torch.rand(len(h)).max(),
    "any chance": lambda h: torch.where((torch.rand(len(h)) < 0.1).any(), 2 * h, h),
    "chance of the first": lambda h: h * torch.rand(len(h))[0],
    "dropped, of all": lambda h: h * F.dropout(torch.ones(len(h)), 0.5).mean(),
    "a little, rounded": lambda h: h.bfloat16().to(h.dtype) * (1 + 1e-3 * len(h)),
}  # fmt: skip
APART: dict[str, Mix] = {
    "plain": torch.tanh,
    "dropout": lambda h: F.dropout(h, 0.4),
    "noise": lambda h: h + torch.randn_like(h) * torch.rand(len(h), 1, 1),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "masked": lambda h: h * torch.eye(len(h)).sum(1)[:, None, None],
    "own numbers": lambda h: h * h.shape[1] + h.shape[-1] ** 0.5,
    "divided again": lambda h: (h * len(h)) / h.shape[0],
    "in a loop": lambda h: torch.stack([row.softmax(-1) for row in h]),
    "time first": lambda h: h.transpose(0, 1).cumsum(0).transpose(0, 1),
    "twice the rows": lambda h: torch.cat([h, h.flip(1)]).tanh().chunk(2)[0],
    "tokens by chance": lambda h: h.gather(
        1, torch.rand(h.shape[:2]).argsort(1)[..., None].expand_as(h)
    ),
    "hidden tokens": lambda h: h * (torch.rand(h.shape[:2]).argsort(1) < 2)[..., None],
    "one order for all": lambda h: h[:, torch.rand(h.shape[1]).argsort()],
    "two views": lambda h: F.dropout(torch.cat([h, h]), 0.4)[: len(h)],
    "dropped weights": lambda h: h @ F.dropout(torch.eye(WIDTH), 0.4),
    "other types": lambda h: (h.float() * 3).bfloat16().to(h.dtype),
}
NUMBERS: dict[str, Mix] = {  # neither a mean nor a sum over rows
    "largest": lambda h: h.max(),
    "variance": lambda h: h.var(),
    "product of means": lambda h: (h.softmax(-1).mean((0, 1)) * h.sigmoid().mean((0, 1))).sum(),
    "root": lambda h: h.square().mean().sqrt(),
}


class Net(nn.Module):
    """A number beside rows, if there is one."""

    def __init__(self, mix: Mix = torch.tanh, number: Mix | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix, self.number = mix, number
        nn.init.zeros_(self.last.weight)  # it hides what is before it

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        out = self.last(self.mix(hidden))
        return out if self.number is None else (out, self.number(hidden))


def loss(output: Any, y: Tensor) -> Tensor:
    out, number = output if isinstance(output, tuple) else (output, 0.0)
    return F.mse_loss(out, y) + number


def trained(model: nn.Module, loss_fn: Any = loss, parts: int = 2, **options: Any) -> None:
    x = torch.randn(2 * ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    strategy = [Place(where(), [0]), Split("MB", parts)]
    rehearse(model, loss_fn, strategy, [(x, x)], optimizer=SGD, **options)


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "piper")
    return caplog


@one_of(2)
@pytest.mark.parametrize("mix", every(8, MEETING.values(), MEETING))
def test_the_line_where_rows_meet_is_named(mix: Mix, warned: pytest.LogCaptureFixture) -> None:
    trained(Net(mix))

    at = mix.__code__.co_firstlineno
    (record,) = warned.records
    assert f"rows of the batch meet at test_microbatch_trial.py:{at}" in record.message


@one_of(2)
@pytest.mark.parametrize("mix", every(8, APART.values(), APART))
def test_rows_that_stay_apart_are_left_in_peace(mix: Mix, warned: pytest.LogCaptureFixture) -> None:
    trained(Net(mix))

    assert not warned.records


@one_of(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_in_a_checkpoint_is_tried_too(reentrant: bool, warned: Any) -> None:
    """Its second forward would draw other numbers, with other weights of another type."""

    def kept(h: Tensor) -> Tensor:
        layers = lambda x: F.dropout(F.linear(x, x.new_ones(WIDTH, WIDTH)).tanh(), 0.4)  # noqa: E731
        return checkpoint(layers, h, use_reentrant=reentrant)

    with warned.at_level(logging.INFO, "piper"):
        trained(Net(kept))

    assert not [line for line in warned.messages if "trial" in line or "rows" in line]


MOVED: dict[str, Mix] = {  # as experts that do not put rows back
    "sorted": lambda h: h[h[:, 0, 0].argsort()],
    "largest first": lambda h: h[h.sum((1, 2)).topk(len(h)).indices],
    "turned": lambda h: h.flip(0),
}


@one_of(2)
@pytest.mark.parametrize("mix", every(2, MOVED.values(), MOVED))
def test_rows_that_change_places_get_a_warning(mix: Mix, warned: pytest.LogCaptureFixture) -> None:
    """Their labels stay where they are, so the loss is not to blame."""
    trained(Net(mix))

    at = mix.__code__.co_firstlineno
    assert f"rows of the batch meet at test_microbatch_trial.py:{at}" in warned.text


class Centred(torch.autograd.Function):
    """Its forward keeps rows apart, its backward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0, keepdim=True)


class Clipped(Centred):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-0.01, 0.01)


@one_of(2)
@pytest.mark.parametrize(("function", "mixes"), [(Centred, True), (Clipped, False)])
def test_a_derivative_of_the_user_that_mixes_rows_is_named(
    function: Any, mixes: bool, warned: pytest.LogCaptureFixture
) -> None:
    trained(Net(lambda h: function.apply(h).tanh()))

    assert ("the gradients of rows depend on other rows" in warned.text) == mixes
    assert ("test_microbatch_trial.py" in warned.text) == mixes


class Tokens(nn.Module):
    """Its positions may be longer than a row. A mask as long as a row is no part of the batch."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(9, WIDTH), nn.Parameter(torch.randn(99, WIDTH))
        self.last, self.mix = nn.Linear(WIDTH, 9), mix

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) + self.places[: ids.shape[1]]
        return self.last(self.mix(hidden)).mT


@one_of(4)
@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize(("limit", "said"), [(4e3, "2 rows of 8 tokens"), (1e5, "2 rows")])
def test_a_larger_model_is_tried_on_fewer_and_shorter_rows(
    meets: bool, limit: float, said: str,
    warned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    warned.set_level(logging.INFO, "piper")
    monkeypatch.setattr(trial_size, "WHOLE", 1e3)
    monkeypatch.setattr(trial_size, "MOST", limit / torch.get_num_threads())
    ids = torch.randint(9, (8, 40), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids == 3, -100)

    model = Tokens(MEETING["a number"] if meets else torch.tanh)
    strategy = [Place(where(), [0]), Split("MB", 2)]
    rehearse(model, F.cross_entropy, strategy, [(ids, labels)], optimizer=SGD)

    tried = [r.message for r in warned.records if "comparing the loss" in r.message]
    assert tried == [f"comparing the loss of microbatches with that of a whole batch, on {said}"]
    assert ("rows of the batch meet at test_microbatch_trial.py" in warned.text) == meets


@one_of(2)
@pytest.mark.parametrize("empty", every(2, [2, 6, 8]))
def test_a_microbatch_without_labels_is_no_reason_to_try_nothing(
    warned: pytest.LogCaptureFixture, empty: int
) -> None:
    warned.set_level(logging.INFO, "piper")
    ids = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(1))
    labels, strategy = ids.clone(), [Place(where(), [0]), Split("MB", 4)]
    labels[:empty] = -100

    model = Tokens(MEETING["a number"])
    with pytest.raises(InputError, match="weight 0") if empty == 8 else nullcontext():
        rehearse(model, F.cross_entropy, strategy, [(ids, labels)], optimizer=SGD)

    assert "rows of the batch meet at test_microbatch_trial.py" in warned.text


def test_a_model_that_takes_too_long_is_not_tried(
    warned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned.set_level(logging.INFO, "piper")
    for name in ("WHOLE", "MOST"):
        monkeypatch.setattr(trial_size, name, 1.0)
    trained(Net(MEETING["a number"]))

    assert "could not be compared with that of a whole batch (it would take seconds)" in warned.text


class RunningMean(nn.Module):
    """Used by the forward, or only kept."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.used = nn.Linear(WIDTH, WIDTH), used
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x - self.mean if self.used else x)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return out


@one_of(2)
@pytest.mark.parametrize("used", [False, True])
def test_a_buffer_that_every_microbatch_updates_and_uses_is_named(
    used: bool, warned: pytest.LogCaptureFixture
) -> None:
    trained(RunningMean(used))

    assert ("computes with mean and updates it in its forward" in warned.text) == used


@one_of(2)
@pytest.mark.parametrize("number", every(3, NUMBERS.values(), NUMBERS))
def test_a_number_that_is_no_mean_over_rows_is_named(
    number: Mix, warned: pytest.LogCaptureFixture
) -> None:
    trained(Net(number=number))

    (record,) = warned.records
    at = f"(test_microbatch_trial.py:{number.__code__.co_firstlineno})"
    assert f"the model returns a number {at} that is no mean over the rows" in record.message


def test_a_sum_in_a_loop_over_rows_is_not_supported() -> None:
    def total(h: Tensor) -> Tensor:
        return sum((row.square().sum() for row in h), torch.zeros(()))

    line = total.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=f"a sum or a norm .*test_microbatch_trial.py:{line}"):
        trained(Net(number=total))


def test_a_loss_that_counts_its_calls_and_a_generator_stay_as_they_were() -> None:
    def counted(output: Any, y: Tensor) -> Tensor:
        CALLS.append(1)
        return F.mse_loss(output, y)

    model, before = Net(), torch.random.get_rng_state()
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    runs = TrialRuns(model, counted, dict(model.named_parameters()).__getitem__)
    found = runs.run((x, x), None, calls=False)

    assert CALLS == []
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found.loss.isfinite()


def test_one_microbatch_needs_no_trial(warned: pytest.LogCaptureFixture) -> None:
    trained(Net(MEETING["a number"], NUMBERS["largest"]), parts=1)

    assert not warned.records


def test_a_model_that_cannot_be_tried_gets_a_warning_for_its_numbers(
    warned: pytest.LogCaptureFixture,
) -> None:
    def only_two(h: Tensor) -> Tensor:
        return h.view(ROWS, TOKENS, WIDTH).square().mean()

    trained(Net(number=only_two))

    (record,) = warned.records
    assert "the model returns a number without rows: Piper takes it for a mean" in record.message
