"""What microbatches weigh: Piper counts what a loss divides by, so that it is that of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from draws import every, one_of
from small_training import SGD, TWO, Net, assert_equal, data, plainly
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Replicate, Split, Trainer, annotate, rehearse, where
from piper.errors import InputError

LABELLED: dict[str, Callable[..., Any]] = {
    "plain": functional.cross_entropy,
    "smoothed": partial(functional.cross_entropy, label_smoothing=0.1),
    "class weights": partial(functional.cross_entropy, weight=torch.arange(1.0, 7.0)),
    "computed": lambda output, labels: functional.cross_entropy(
        output, torch.where(labels == 0, -100, labels)
    ),
    "another": lambda output, labels: functional.cross_entropy(
        output, labels.clamp(min=0) - 1, ignore_index=-1
    ),
    "by hand": lambda output, labels: (
        functional.nll_loss(output.log_softmax(1), labels, reduction="sum")
        / (labels != -100).sum().clamp(min=1)
    ),
}


WAYS = product(LABELLED, ["microbatches", "replicas"])


@one_of(2)
@pytest.mark.parametrize("seed", range(4))
def test_class_weights_of_any_value_are_counted_exactly(seed: int) -> None:
    """In float32: trials run in float64, and a sum in float32 would be another one."""
    weight = torch.rand(6, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    labels = torch.randint(0, 6, (12,), generator=torch.Generator().manual_seed(seed))
    batches = [(x, labels) for x, _ in data()]

    result = rehearse(Net(), loss_fn, [*TWO, Split("MB", 4)], batches, optimizer=SGD)

    assert_equal(result, plainly(Net(), loss_fn, batches))


@one_of(2)
@pytest.mark.parametrize(("loss", "strategy"), every(5, WAYS))
def test_a_mean_over_labels_that_count_is_weighed_by_them(loss: str, strategy: str) -> None:
    """Piper counts them. Microbatches with few of them must weigh less."""
    loss_fn = LABELLED[loss]
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 6, (12,), generator=generator)
    labels[[0, 1, 4]] = -100
    batches = [(x, labels) for x, _ in data()]
    cut = [Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)]

    result = rehearse(
        Net(), loss_fn, [*TWO, Split("MB", 4)] if strategy == "microbatches" else cut, batches,
        optimizer=SGD,
    )  # fmt: skip

    assert_equal(result, plainly(Net(), loss_fn, batches))


@one_of(2)
@pytest.mark.parametrize("loss_fn", [LABELLED["plain"], LABELLED["smoothed"], LABELLED["by hand"]])
def test_a_microbatch_without_any_label_that_counts_weighs_nothing(loss_fn: Any) -> None:
    labels = torch.tensor([-100, -100, -100, 1, 2, -100, 3, 3, 4, -100, -100, -100])
    batches = [(x, labels) for x, _ in data()]

    result = rehearse(Net(), loss_fn, [*TWO, Split("MB", 4)], batches, optimizer=SGD)

    assert_equal(result, plainly(Net(), loss_fn, batches))


def by_hand(output: Tensor, labels: Tensor) -> Tensor:
    """Its gradient is NaN where no label counts."""
    each = functional.cross_entropy(output, labels, reduction="none")
    return each.sum() / (labels != -100).sum()


WEIGHTS = torch.tensor([1.0, 0.3, 2.0, 0.7, 1.1, 5.0])
EMPTY: dict[str, Any] = {
    "class weights": partial(functional.cross_entropy, weight=WEIGHTS),
    "smoothed class weights": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "a module": lambda o, y: nn.NLLLoss(weight=WEIGHTS)(o.log_softmax(1), y),
}


@one_of(4)
@pytest.mark.parametrize("sizes", [None, [3, 3, 3, 3], [2, 2, 4, 4]], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_a_microbatch_whose_gradient_would_be_nan_weighs_nothing(
    name: str, sizes: list[int] | None
) -> None:
    labels = torch.tensor([-100, -100, -100, 1, 2, -100, 3, 3, -100, -100, -100, -100])
    batches = [(x, labels) for x, _ in data()]
    cut = Split("MB", 4, sizes)

    result = rehearse(Net(), EMPTY[name], [*TWO, cut], batches, optimizer=SGD)

    assert_equal(result, plainly(Net(), EMPTY[name], batches))


def by_positives(output: Tensor, labels: Tensor) -> Tensor:
    """Rows without a positive one are in the sum, too."""
    wanted = (labels > 0).to(output.dtype)
    each = functional.binary_cross_entropy_with_logits(output[:, 0], wanted, reduction="none")
    return each.sum() / wanted.sum()


SMOOTHED = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 1.0])
REFUSED: dict[str, tuple[list[int], Any, Any]] = {
    "by hand": ([-100, -100, 1, 2], Net, by_hand),
    "by positives": ([0, 0, 1, 2], Net, by_positives),
    "a class without a weight": (
        [0, 0, 1, 2], Net, nn.CrossEntropyLoss(weight=SMOOTHED, label_smoothing=0.1)
    ),
}  # fmt: skip


@one_of(2)
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_where_something_would_be_lost(name: str) -> None:
    """What is divided by zero may not be zero."""
    labels, make, loss_fn = REFUSED[name]
    batch = (data(rows=4)[0][0], torch.tensor(labels))

    with pytest.raises(InputError) as refused:
        rehearse(make(), loss_fn, [Place(where(), [0]), Split("MB", 2)], [batch])

    assert str(refused.value) == (
        "batch: microbatch 0 has weight 0: a mean over nothing is not a number\n"
        "  fix: divide by at least 1 in your loss, `mask.sum().clamp(min=1)`; or use a loss that "
        'is a sum, and Trainer(reduction="sum", loss_weight=...)'
    )


def test_means_over_different_counts_have_no_common_weight(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = (data(rows=4)[0][0], torch.tensor([-100, 0, 1, 2]))

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels) + output.square().mean()

    with pytest.raises(InputError) as refused:
        rehearse(Net(), loss_fn, [*TWO, Split("MB", 2)], [batch])
    warned = caplog.text
    caplog.clear()
    full = (batch[0], batch[1].clamp(min=0))
    result = rehearse(Net(), loss_fn, [*TWO, Split("MB", 2)], [full], optimizer=SGD)

    assert str(refused.value) == (
        "batch: a part of the loss is a mean over labels other than -100, another part is not: in "
        "microbatch 0 there are 1 of 2, so no single weight is right\n"
        "  fix: make both means over rows: with w = mask * mask.numel() / mask.sum() in your "
        "batches, for the mask of all replicas together, (losses * w).mean() is the mean of the "
        "losses in the mask; use one microbatch and one replica; or give the Trainer "
        "loss_weight=lambda *microbatch: the weight that you want"
    )
    assert "a step on a batch like this one is an error: a part of the loss" in warned
    assert "like this one" not in caplog.text
    assert_equal(result, plainly(Net(), loss_fn, [full]))


def of_next_tokens(output: Tensor, labels: Tensor) -> Tensor:
    """As in transformers: the last token has no next one, in any row."""
    logits = torch.stack([output, 2 * output, -output], 2)
    following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return functional.cross_entropy(logits, following) + output.square().mean()


def test_what_no_row_counts_leaves_equal_weights() -> None:
    labels = torch.arange(36).view(12, 3) % 5
    full, ignored = ([(x, each) for x, _ in data()] for each in (labels, labels.clone()))
    ignored[1][1][3, 2] = -100

    result = rehearse(Net(), of_next_tokens, [*TWO, Split("MB", 3)], full, optimizer=SGD)

    assert_equal(result, plainly(Net(), of_next_tokens, full))
    with pytest.raises(InputError, match="another part is not: in microbatch 0 there are 7 of 12"):
        rehearse(Net(), of_next_tokens, [*TWO, Split("MB", 3)], ignored, optimizer=SGD)


@pytest.mark.parametrize("places", [(), (3,)])
def test_means_over_different_counts_are_written_as_means_over_rows(places: tuple[int]) -> None:
    """As the message above says, also where a row has several labels."""
    labels = torch.tensor([-100, -100, 1, 2, 3, -100, 4, 0, 0, 1, 2, 3])
    labels = torch.stack([labels.roll(k) for k in range(*places)], 1) if places else labels
    mask = labels != -100
    weighed = [(x, (labels, mask * mask.numel() / mask.sum())) for x, _ in data()]

    def logits(output: Tensor, labels: Tensor) -> Tensor:
        return output if labels.dim() == 1 else torch.stack([output, 2 * output, -output], 2)

    def loss_fn(output: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        each = functional.cross_entropy(logits(output, given[0]), given[0], reduction="none")
        return (each * given[1]).mean() + output.square().mean()

    def wanted(output: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        each = functional.cross_entropy(logits(output, given[0]), given[0])
        return each + output.square().mean()

    result = rehearse(Net(), loss_fn, [*TWO, Split("MB", 4)], weighed, optimizer=SGD)

    assert_equal(result, plainly(Net(), wanted, weighed))


def test_a_weight_of_the_user_is_not_called_wrong(caplog: pytest.LogCaptureFixture) -> None:
    batch = (data(rows=8)[0][0], torch.tensor([-100, 0, 1, 2, 3, 4, 0, 1]))
    weight = {"loss_weight": lambda x, labels: (labels != -100).sum()}

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels) + output.square().mean()

    with caplog.at_level("INFO", "piper"):
        rehearse(Net(), loss_fn, [*TWO, Split("MB", 2)], [batch], optimizer=SGD, **weight)

    assert "no trial" not in caplog.text


# Losses that a model computes itself


class Own(Net):
    """A model that returns its loss."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(x), y)


def plain_own(loss: Callable[..., Any], batches: Any) -> Any:
    return plainly(Own(loss), lambda output, _: output, [(x, y, y) for x, y in batches])


@one_of(2)
@pytest.mark.parametrize("loss", every(2, [*LABELLED.values(), functional.mse_loss]))
def test_a_models_own_loss_is_counted_too(loss: Callable[..., Any]) -> None:
    labels = torch.tensor([-100, -100, -100, 1, 2, -100, 3, 3, 4, 0, 5, 1])
    mean = loss is functional.mse_loss
    batches = [(x, y if mean else labels) for x, y in data()]

    result = rehearse(Own(loss), None, [*TWO, Split("MB", 2)], batches, optimizer=SGD)

    assert_equal(result, plain_own(loss, batches))


class Tokens(nn.Module):
    """A causal language model that shifts its labels by itself, as Hugging Face models do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embedding(tokens).cumsum(1)
        with annotate("PP"):
            logits = self.head(torch.tanh(x))
            if self.kind == "sliced":
                logits, labels = logits[:, :-1], labels[:, 1:]
            else:
                labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            return functional.cross_entropy(logits.reshape(-1, 9).float(), labels.reshape(-1))


@pytest.mark.parametrize("kind", ["sliced", "padded"])
@pytest.mark.parametrize("strategy", every(2, ["microbatches", "replicas"]))
def test_shifted_labels_of_padded_rows_are_counted(kind: str, strategy: str) -> None:
    tokens = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([1, 2, 5, 3, 4, 5, 1, 1])  # the last two have nothing to predict
    labels = torch.where(torch.arange(5) < lengths[:, None], tokens, -100)
    cut = [Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)]
    chosen = cut if strategy == "replicas" else [*TWO, Split("MB", 4)]

    result = rehearse(Tokens(kind), None, chosen, [(tokens, labels)] * 3, optimizer=SGD)

    wanted = plainly(Tokens(kind), lambda output, _: output, [(tokens, labels, labels)] * 3)
    assert_equal(result, wanted)


def test_an_own_loss_that_is_not_seen_to_be_a_mean_needs_a_word() -> None:
    def root(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target).sqrt()

    with pytest.raises(InputError, match="the model computes its own loss, for each of 2 parts"):
        rehearse(Own(root), None, [*TWO, Split("MB", 2)], data(), optimizer=SGD)
    rehearse(Own(root), None, [*TWO, Split("MB", 2)], data(), optimizer=SGD, reduction="mean")
    weighed = rehearse(
        Own(functional.mse_loss), None, [*TWO, Split("MB", 2)], data(), optimizer=SGD,
        loss_weight=lambda x, y: 3,
    )  # fmt: skip

    assert_equal(weighed, plain_own(functional.mse_loss, data()))


def test_a_kind_of_batch_that_comes_later_is_counted_too() -> None:
    labels = torch.tensor([-100, 0, 1, 2, 3, 4, 5, -100, -100, -100, 1, 1])
    x = data()[0][0]
    trainer = Trainer(
        Net(), functional.cross_entropy, [Place(where(), [0]), Split("MB", 2)],
        example=(x, labels), optimizer=SGD, device="cpu",
    )  # fmt: skip

    first = trainer.step(x[:8], labels[:8]).loss

    assert first == pytest.approx(functional.cross_entropy(Net()(x[:8]), labels[:8]).item())


def test_the_log_says_what_is_counted_and_whether_loss_weight_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = torch.arange(20).reshape(4, 5) % 9
    labels = torch.where(torch.arange(5) < torch.tensor([[2], [5], [3], [1]]), tokens, -100)
    parts = [*TWO, Split("MB", 2)]

    def counted(tokens: Tensor, labels: Tensor) -> Tensor:
        return (labels != -100).sum()  # not after the shift

    with caplog.at_level("INFO", "piper"):
        rehearse(Tokens("sliced"), None, parts, [(tokens, labels)])
        rehearse(Tokens("sliced"), None, parts, [(tokens, labels)], loss_weight=counted)

    assert (
        "the loss is a mean over labels other than -100: a microbatch counts by how many of them "
        "it has"
    ) in caplog.messages
    assert (
        "loss_weight says [7.0, 4.0], but the loss is a mean over labels other than -100, of which "
        "microbatches have [5.0, 2.0]: leave out loss_weight, and Piper uses these"
        in caplog.messages
    )
