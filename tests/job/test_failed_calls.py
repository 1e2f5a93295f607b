"""Errors of torch in the model or the loss: the line, what the batch has, and what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import one_of
from torch import Tensor, nn

import piper
from piper.errors import CaptureError
from piper.strategies import gpipe

X, Y = torch.randn(8, 6), torch.randint(3, (8,))
TWO = gpipe(pp=1, microbatches=2)
FIRST = "the first one had x [8, 6] of float32, labels [8] of int64\n"
LIKE_FIRST = "  fix: give batches with the sizes and types of the first one, or correct this line"
PLAIN = "  fix: give example= what the forward of the model takes, or correct this line; if the "


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Named(Net):
    def forward(self, x: Tensor) -> Any:
        return {"hidden": x, "logits": self.layer(x)}


class Listed(Net):
    def forward(self, x: Tensor) -> Any:
        return [self.layer(x)]


class Numbers(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).tolist()


class Wrong(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).view(9, 4)


class Own(Net):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] != 6:
            raise ValueError("mine")
        assert x.dtype == torch.float32, "mine, too"
        return self.layer(x)


class OwnLoss(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.layer(x), labels)


def made(model: nn.Module, loss_fn: Any = F.cross_entropy, example: Any = (X, Y)) -> piper.Trainer:
    return piper.Trainer(model, loss_fn, TWO, example=example, device="cpu")


@pytest.fixture(scope="module")
def trainer() -> Iterator[piper.Trainer]:
    with made(Net()) as found:
        yield found


def said(call: Any) -> str:
    with pytest.raises(CaptureError) as error:
        call()
    return str(error.value)


def test_a_batch_of_another_size_is_told_with_the_first(trainer: piper.Trainer) -> None:
    text = said(lambda: trainer.step(X[:, :4], Y))

    assert text.startswith("test_failed_calls.py:") and ": RuntimeError: " in text
    assert f"\n    this batch has x [8, 4] of float32, labels [8] of int64; {FIRST}" in text
    assert text.endswith(LIKE_FIRST)


def test_labels_of_another_type_are_told_with_the_first(trainer: piper.Trainer) -> None:
    text = said(lambda: trainer.step(X, Y.float()))

    assert text.startswith("loss_fn: it raised RuntimeError: ")
    assert "output is [4, 3] of float32, labels are [4] of float32\n" in text
    assert f"this batch has x [8, 6] of float32, labels [8] of float32; {FIRST}" in text
    assert text.endswith(LIKE_FIRST)


def test_a_batch_in_another_order_is_told_so(trainer: piper.Trainer) -> None:
    labels = torch.randint(3, (8, 6))
    with made(Net(), lambda out, y: out.mean() + y.float().mean(), (X, labels)) as other:
        text = said(lambda: other.step(labels[:, 0].float(), X))
    assert text.endswith(LIKE_FIRST)

    with made(Net(), lambda out, y: out.mean() + y.mean(), (X, X[:, 0])) as other:
        text = said(lambda: other.step(X[:, 0], X))
    assert text.endswith("it has the same shapes in another order: give it in that of the example")


def test_evaluations_and_predictions_are_told_likewise(trainer: piper.Trainer) -> None:
    assert FIRST in said(lambda: trainer.evaluate([(X[:, :4], Y)]))
    assert "x [8, 4] of float32; the first one had x [8, 6] of float32\n" in said(
        lambda: trainer.predict(X[:, :4])
    )


def test_an_example_that_does_not_fit_says_what_goes_where() -> None:
    text = said(lambda: made(Net(), example=(X[:, :4], Y)))

    has = "the batch has x [8, 4] of float32, labels [8] of int64"
    assert f"\n    {has}; the last one goes to loss_fn, the others to the model\n{PLAIN}" in text


def test_a_model_that_never_runs_has_its_line() -> None:
    rehearsed = said(lambda: piper.rehearse(Wrong(), F.cross_entropy, TWO, [(X, Y)]))

    assert rehearsed.startswith("test_failed_calls.py:")
    assert ": RuntimeError: shape '[9, 4]' is invalid for input of size " in rehearsed


def test_a_loss_of_the_model_itself_is_the_models() -> None:
    text = said(lambda: made(OwnLoss(), None, {"x": X, "labels": Y.float()}))

    assert "\n    the batch has x [8, 6] of float32, labels [8] of float32\n" in text


@one_of(2)
@pytest.mark.parametrize(
    ("model", "loss_fn", "given", "fix"),
    [
        (
            Named, F.cross_entropy,
            "output is a dict with hidden, logits ([4, 6] of float32 and [4, 3] of float32), ",
            "write loss_fn=lambda out, y: F.cross_entropy(out['logits'], y)",
        ),
        (
            Named, nn.CrossEntropyLoss(),
            "output is a dict with hidden, logits (",
            "write loss_fn=lambda out, y: F.cross_entropy(out['logits'], y)",
        ),
        (
            Listed, F.cross_entropy,
            "output is a list ([4, 3] of float32), labels are [4] of int64",
            "write loss_fn=lambda out, y: F.cross_entropy(out[0], y)",
        ),
        (
            Numbers, F.cross_entropy, "output is a list (",
            "return tensors from the model: leave out .tolist() and .item()",
        ),
        (
            Net, lambda y, out: F.cross_entropy(out, y),
            "output is [4, 3] of float32, labels are [4] of int64",
            "loss_fn gets (output, labels), in this order: loss_fn=lambda out, y: F.cross_entropy("
            "out, y)",
        ),
        (
            Net, F.nll_loss,
            "output is [4, 3] of float32, labels are [4] of float32",
            "give class labels as int64: y.long()",
        ),
    ],
    ids=["dict", "module", "list", "numbers", "swapped", "labels"],
)  # fmt: skip
def test_a_loss_says_what_it_was_given(
    model: type[Net], loss_fn: Any, given: str, fix: str
) -> None:
    labels = Y.float() if loss_fn is F.nll_loss else Y

    text = said(lambda: made(model(), loss_fn, (X, labels)))

    assert (
        ": it raised " in text or ": loss_fn raised " in text
    ) and f"\n    it was given (output, labels): {given}" in text
    assert text.endswith(fix)


@one_of(2)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "labels", [Y.tolist(), Y[:, None].tolist(), tuple(Y.tolist())], ids=["list", "lists", "tuple"]
)
def test_labels_are_tensors(labels: Any, later: bool) -> None:
    def call() -> object:
        example = (X, Y) if later else (X, labels)
        with piper.Trainer(Net(), F.cross_entropy, example=example, device="cpu") as trainer:
            return trainer.step(X, labels)

    text = said(call)
    kind = "a tuple" if isinstance(labels, tuple) else "a list"

    assert f"labels are {kind} of numbers\n" in text
    assert text.endswith("fix: give labels as a tensor: torch.tensor(labels)")


class Tokens(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.table, self.wrap = nn.Embedding(9, 9), wrap

    def forward(self, ids: Tensor) -> Any:
        return self.wrap(self.table(ids))


@pytest.mark.parametrize(
    ("wrap", "fix"),
    [
        (lambda out: out, "loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())"),
        (
            lambda out: (out, 1.0),
            "loss_fn=lambda out, y: F.cross_entropy(out[0].flatten(0, 1), y.flatten())",
        ),
        (
            lambda out: {"logits": out},
            "loss_fn=lambda out, y: F.cross_entropy(out['logits'].flatten(0, 1), y.flatten())",
        ),
    ],
    ids=["plain", "tuple", "dict"],
)
def test_tokens_of_all_rows_are_flattened_for_their_loss(wrap: Any, fix: str) -> None:
    ids = torch.randint(9, (8, 5))

    text = said(lambda: made(Tokens(wrap), F.cross_entropy, (ids, ids)))

    assert text.endswith(fix)


def test_what_users_raise_themselves_stays_as_it_is() -> None:
    with made(Own()) as trainer:
        with pytest.raises(ValueError, match="^mine"):
            trainer.step(X[:, :4], Y)
        with pytest.raises(AssertionError, match="^mine, too"):
            trainer.step(X.double(), Y)


def test_integers_for_a_model_of_floats_are_to_be_converted(trainer: piper.Trainer) -> None:
    text = said(lambda: trainer.step(X.long(), Y))

    assert text.endswith("give batches in the type of the model, as in x.to(torch.float32)")
