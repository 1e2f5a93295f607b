"""A loss that is no mean over rows is refused before it trains wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from draws import every, one_of
from replicas import Net, data
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Replicate, Split, Trainer, rehearse, where
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.loss import random_outputs
from piper.job.loss.mean_loss_check import refuse_no_mean

PARTS = [Place(where(), [0]), Split("MB", 2)]
UNEQUAL = [[*PARTS[:-1], Split("MB", 2, sizes=[2, 1])], PARTS]
REPLICAS = [Place(where(), [0, 1]), Replicate(where(), [0, 1])]


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).double()
    return ((output - target).square() * mask).sum() / mask.sum()


def test_a_mask_is_counted_in_every_batch() -> None:
    """Also if it is full in the example."""
    x, y = data()[0]
    full = torch.ones_like(y)
    trainer = Trainer(Net(), masked, PARTS, example=(x, full), device="cpu")

    found = trainer.step(x, y).loss

    assert found == pytest.approx(masked(Net()(x), y).item(), rel=1e-12)


class Weighing(nn.Module):
    """Classes, of which some count more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(1.0, 7.0, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        label = target.argmax(1)
        each = functional.cross_entropy(output, label, reduction="none")
        weight = self.weight[label]  # type: ignore[index]
        return (each * weight).sum() / weight.sum()


def rmse(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target).sqrt()


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Positives weigh as much as negatives, by their numbers in the batch."""
    wanted = (target > 0).double()
    weight = (1 - wanted).sum() / wanted.sum()
    return functional.binary_cross_entropy_with_logits(output, wanted, pos_weight=weight)


WRONG: dict[str, Callable[..., Any]] = {
    "a root": rmse,
    "a norm": lambda output, target: (output - target).norm(),
    "the worst": lambda output, target: (output - target).abs().max(),
    "balanced": balanced,
    "broadcast": lambda output, target: functional.mse_loss(output[:, :1], target[:, 0]),
    "a small regulariser": lambda output, target: (
        functional.mse_loss(output, target) + 1e-5 * output.mean(0).square().sum()
    ),
    "spread": lambda output, target: functional.mse_loss(output, target) - 0.01 * output.std(),
    "pairs": lambda output, target: (output @ target.T).log_softmax(1).diagonal().mean(),
    "overlap": lambda output, target: (output.sigmoid() * target).sum() / output.sigmoid().sum(),
}
RIGHT: dict[str, Callable[..., Any]] = {
    "squares": functional.mse_loss,
    "sums of rows": lambda output, target: (output - target).square().sum(1).mean(),
    "what is there for training only": lambda output, target: functional.mse_loss(
        functional.dropout(output, 0.5, training=False), target
    ),
    "a constant more": lambda output, target: functional.l1_loss(output, target) + 3.0,
    "what cannot be tried": lambda output, target: functional.binary_cross_entropy(
        output.sigmoid(), target.sigmoid()
    ),
    "masked": masked,
    "masked by at least one": lambda output, target: (
        ((output - target).square() * (target > 0)).sum().div((target > 0).sum().clamp(min=1))
    ),
    "chosen": lambda output, target: (output - target).square()[target > 0].mean(),
    "classes": Weighing(),
    "a sum": lambda output, target: (output - target).square().sum(),
    "a sum over the rows": lambda output, target: (output - target).square().sum() / len(output),
    "over positives": lambda output, target: (
        functional.binary_cross_entropy_with_logits(output, (target > 0).double(), reduction="sum")
        / (target > 0).sum()
    ),
    "no rule, but a mean": lambda output, target: (
        torch.einsum("nc,nc->", output - target, output - target) / output.numel()
    ),
}


@one_of(2)
@pytest.mark.parametrize("strategy", every(2, [PARTS, REPLICAS], ["parts", "replicas"]))
@pytest.mark.parametrize("loss_fn", every(5, WRONG.values(), WRONG))
def test_what_is_no_mean_is_refused(loss_fn: Callable[..., Any], strategy: Any) -> None:
    with pytest.raises(InputError) as refused:
        rehearse(Net(), loss_fn, strategy, data())

    assert "microbatches would not add up to the whole batch" in str(refused.value)
    assert "loss_weight=lambda *microbatch: 1" in str(refused.value)


@one_of(2)
@pytest.mark.parametrize("strategy", every(2, [PARTS, REPLICAS], ["parts", "replicas"]))
@pytest.mark.parametrize("loss_fn", every(5, RIGHT.values(), RIGHT))
def test_means_train_as_on_the_whole_batch(loss_fn: Callable[..., Any], strategy: Any) -> None:
    found = rehearse(Net(), loss_fn, strategy, data())

    assert found.losses[0] == pytest.approx(loss_fn(Net()(data()[0][0]), data()[0][1]).item())


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output + torch.rand_like(output).cumsum(0), target)


def of_all_rows(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.view(24, 6).cumsum(0), target)


UNTESTABLE = {
    r"it is [\d.]+ on some, and [\d.]+ on the same ones again": noisy,
    r"it fails on them with RuntimeError: shape '\[24, 6\]' is invalid for input": of_all_rows,
    "it is nan on some of them": lambda output, target: output.log().mean(),
    "it is inf on some, and inf and inf on the halves": lambda output, target: output.sum() / 0,
}


@pytest.mark.parametrize("why", UNTESTABLE)
def test_a_loss_that_can_neither_be_proved_nor_tested_is_refused(why: str) -> None:
    leaves, spec = [((12, 6), torch.float32)], pytree.tree_structure(0)
    target = torch.randn(24, 6)

    with pytest.raises(InputError, match=f"cannot test it on random outputs: {why}"):
        refuse_no_mean(UNTESTABLE[why], (leaves, spec), Batch.of((target, target)), 12)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Rows against each other, and no labels: it runs on any number of rows."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


@one_of(2)
@pytest.mark.parametrize("strategy", UNEQUAL, ids=["as given", "as it comes"])
def test_microbatches_of_unequal_sizes_are_tested_too(strategy: Any) -> None:
    with pytest.raises(InputError, match="(?s)would not add up.*one microbatch and one replica"):
        rehearse(Net(), contrastive, strategy, [tuple(one[:9] for one in data()[0])])


def test_a_loss_of_outputs_without_rows_is_refused() -> None:
    """Such as the largest of all rows that the model computes itself."""

    class Largest(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().max()

    with pytest.raises(InputError, match="random outputs: no output of the model has rows"):
        rehearse(Largest(), lambda output, target: output.exp().log(), PARTS, data())


def test_what_the_user_says_must_be_true() -> None:
    with pytest.raises(InputError, match="but the loss is a mean over the rows"):
        rehearse(Net(), functional.mse_loss, PARTS, data(), reduction="sum")
    with pytest.raises(InputError, match="but the loss is a sum over the rows"):
        rehearse(Net(), RIGHT["a sum"], PARTS, data(), reduction="mean")


def squares(output: Any, target: Any) -> Any:
    """A sum over rows, which no graph proves."""
    return (output - target).square().sum().exp().log()


NO_SUMS: dict[str, Callable[..., Any]] = {
    "a number": lambda output, target: squares(output, target) + 1.0,
    "a mean": lambda output, target: squares(output, target) + output.abs().mean(),
    "a small mean": lambda output, target: squares(output, target) + 1e-4 * output.mean(),
    "a root": lambda output, target: squares(output, target).sqrt(),
    "a square": lambda output, target: squares(output, target).square(),
    "the largest": lambda output, target: squares(output, target) + output.max(),
    "by the rows": lambda output, target: squares(output, target) / len(output) ** 0.5,
    "a spread": lambda output, target: squares(output, target) + output.std(),
}
SUMS: dict[str, Callable[..., Any]] = {
    "squares": squares,
    "its part of the rows": lambda output, target: squares(output, target) + len(target) / 8,
    "two sums": lambda output, target: squares(output, target) + output.abs().sum(),
}


@one_of(2)
@pytest.mark.parametrize("name", every(2, NO_SUMS, NO_SUMS))
def test_what_the_user_calls_a_sum_must_be_one(name: str) -> None:
    with pytest.raises(InputError, match='reduction: it is "sum", but on random data'):
        rehearse(Net(), NO_SUMS[name], PARTS, data(), reduction="sum")


@one_of(2)
@pytest.mark.parametrize("name", every(2, SUMS, SUMS))
def test_sums_train_as_on_the_whole_batch(name: str) -> None:
    found = rehearse(Net(), SUMS[name], PARTS, data(), reduction="sum")

    assert found.losses[0] == pytest.approx(SUMS[name](Net()(data()[0][0]), data()[0][1]).item())


class Penalised(Net):
    """Returns a penalty of its weights, which is the same for each microbatch."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), sum(one.square().sum() for one in self.parameters())


class PenalisedLoss(Penalised):
    """Computes its own loss with it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output, penalty = super().forward(x)
        return squares(output, y) + penalty


@pytest.mark.soak
def test_a_penalty_beside_a_sum_is_never_counted_for_each_microbatch() -> None:
    def loss(output: Any, target: Any) -> Any:
        return squares(output[0], target) + 0.1 * output[1]

    rows = len(data()[0][1])

    def weighed(output: Any, target: Any) -> Any:
        return squares(output[0], target) + 0.1 * output[1] * len(target) / rows

    with pytest.raises(InputError, match="others are not, divide these sums") as refused:
        rehearse(Penalised(), loss, PARTS, data())
    assert 'reduction="sum"' not in str(refused.value)  # it would count the penalty twice
    for model, function in ((Penalised(), loss), (PenalisedLoss(), None)):
        with pytest.raises(InputError, match="such as a regulariser"):
            rehearse(model, function, PARTS, data(), reduction="sum")
    found = rehearse(Penalised(), weighed, PARTS, data(), reduction="sum")
    assert found.losses[0] == pytest.approx(loss(Penalised()(data()[0][0]), data()[0][1]).item())


def test_a_sum_is_told_to_be_one() -> None:
    with pytest.raises(InputError, match='fix: it is a sum over rows: give .* reduction="sum"'):
        rehearse(Net(), squares, PARTS, data())


def test_one_who_says_what_microbatches_weigh_is_believed() -> None:
    found = rehearse(
        Net(), masked, PARTS, data(), loss_weight=lambda x, y: (y > 0).sum(), reduction="mean"
    )

    assert found.losses[0] == pytest.approx(masked(Net()(data()[0][0]), data()[0][1]).item())
    rehearse(Net(), WRONG["a root"], PARTS, data(), loss_weight=lambda *microbatch: 1)
    rehearse(Net(), RIGHT["a sum"], PARTS, data(), reduction="sum")


def test_one_microbatch_on_one_device_may_have_any_loss() -> None:
    found = rehearse(Net(), masked, [Place(where(), [0])], data())

    assert found.losses[0] == pytest.approx(masked(Net()(data()[0][0]), data()[0][1]).item())


def test_the_users_loss_is_left_as_it_is() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return functional.mse_loss(output, target)

    loss_fn = Counting()
    rehearse(Net(), loss_fn, PARTS, data())

    assert loss_fn.calls == 0  # a copy was traced


def test_long_rows_and_large_vocabularies_are_tried_in_part(monkeypatch: Any) -> None:
    """Labels that do not count are at the ends of rows."""
    rows, length, vocabulary = 2, 512, 100
    monkeypatch.setattr(random_outputs, "MOST", 2**13)
    labels = torch.randint(0, vocabulary, (4, length))
    ends = torch.arange(1, 5)[:, None] * length // 5
    seen: list[int] = []

    def loss(output: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        label, mask = given
        seen.append(output.numel())
        each = functional.cross_entropy(output.flatten(0, 1), label.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    leaves, spec = [((rows, length, vocabulary), torch.bfloat16)], pytree.tree_structure(0)
    for mask in (torch.arange(length) < ends, torch.ones(4, length, dtype=torch.bool)):
        given = (labels, mask.float())
        if mask.all():
            refuse_no_mean(loss, (leaves, spec), Batch.of((labels, given)), rows)
        else:
            with pytest.raises(InputError):
                refuse_no_mean(loss, (leaves, spec), Batch.of((labels, given)), rows)
    assert 0 < max(seen) <= 2**13


def test_a_vector_as_long_as_rows_may_have_none() -> None:
    """Sums of twelve layers that stand beside twelve rows."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        found, layers = output
        return functional.mse_loss(found, target) + 0.1 * layers.sum()

    _, spec = pytree.tree_flatten((0, 0))
    leaves = [((12, 6), torch.float32), ((12,), torch.float32)]
    target = torch.randn(24, 6)

    refuse_no_mean(loss, (leaves, spec), Batch.of((target, target)), 12)


def test_types_that_are_coarse_make_no_difference() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.to(target.dtype), target)

    leaves, spec = [((12, 6), torch.bfloat16)], pytree.tree_structure(0)
    target = torch.randn(24, 6).bfloat16()

    refuse_no_mean(loss, (leaves, spec), Batch.of((target, target)), 12)
