"""A batch may have any form that loaders give. The numbers are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.errors import InputError

SGD = partial(torch.optim.SGD, lr=0.1)
PIPELINE = partial(piper.strategies.one_f_one_b, pp=2, microbatches=2)
Pair = namedtuple("Pair", "inputs target")  # noqa: PYI024
X, MASK, Y = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))


class Encoding(UserDict):  # like BatchEncoding of transformers: a mapping that is no dict
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Net(nn.Module):
    """Two stages. It takes what a Hugging Face model takes, and may compute its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> Any:
        x = x if mask is None else x * mask
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        if labels is None:
            return x
        return Output(functional.mse_loss(x, labels), x)


def plain(loss: Any, model: nn.Module, steps: int) -> list[float]:
    """Losses of autograd, on the whole batch."""
    optimizer, found = SGD(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        one = loss(model)
        one.backward()
        optimizer.step()
        found.append(one.item())
    return found


def trained(model: nn.Module, loss_fn: Any, example: Any, *batches: Any) -> list[float]:
    trainer = piper.Trainer(model, loss_fn, example=example, optimizer=SGD)
    try:
        return [batch(trainer.step).loss for batch in batches]
    finally:
        assert len(trainer._programs.ready) == 1, "another form is no reason to compile again"
        trainer.close()


NAMED = {"x": X, "mask": MASK, "labels": Y}
OWN_LOSS: dict[str, Any] = {
    "keywords": (NAMED, lambda step: step(**NAMED)),
    "dict": (NAMED, lambda step: step(NAMED)),
    "other order": (NAMED, lambda step: step(labels=Y, mask=MASK, x=X)),
    "mapping": (Encoding(NAMED), lambda step: step(Encoding(NAMED))),
}


@one_of(2)
@pytest.mark.parametrize("example", OWN_LOSS)
def test_a_model_with_its_own_loss_gets_keywords(example: str) -> None:
    batches = [batch for _, batch in OWN_LOSS.values()]
    wanted = plain(lambda model: model(**NAMED).loss, Net(), len(batches))

    found = trained(Net(), None, OWN_LOSS[example][0], *batches)

    assert found == pytest.approx(wanted, rel=1e-12)


BY_POSITION: dict[str, Any] = {
    "positions": ((X, MASK, Y), lambda step: step(X, MASK, Y)),
    "tuple": ((X, MASK, Y), lambda step: step((X, MASK, Y))),
    "list": ([X, MASK, Y], lambda step: step([X, MASK, Y])),
}
BY_NAME: dict[str, Any] = {
    "keywords": (NAMED, lambda step: step(**NAMED)),
    "dict": (NAMED, lambda step: step(NAMED)),
}
INPUTS: dict[str, Any] = {
    "inputs and labels": (
        ({"x": X, "mask": MASK}, Y), lambda step: step({"mask": MASK, "x": X}, Y)
    ),
    "named pair": (
        Pair({"x": X, "mask": MASK}, Y), lambda step: step(Pair({"x": X, "mask": MASK}, Y))
    ),
    "mixed": (
        [Encoding({"x": X, "mask": MASK}), Y],
        lambda step: step([Encoding({"x": X, "mask": MASK}), Y]),
    ),
}  # fmt: skip


@one_of(2)
@pytest.mark.parametrize(
    ("kind", "example"),
    [(kind, example) for kind in (BY_POSITION, BY_NAME, INPUTS) for example in kind],
)
def test_a_loss_function_gets_the_labels(kind: dict[str, Any], example: str) -> None:
    batches = [batch for _, batch in kind.values()]
    wanted = plain(lambda model: functional.mse_loss(model(X, MASK), Y), Net(), len(batches))

    found = trained(Net(), functional.mse_loss, kind[example][0], *batches)

    assert found == pytest.approx(wanted, rel=1e-12)


class Nested(Net):
    """Takes one structure as its argument, and looks into it in its own way."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch["inputs"][0]["x"], batch["inputs"][1], batch["labels"])


class Attributes(Net):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch.x, batch.mask, batch.labels)


class Listed(Net):
    def forward(self, parts: Any) -> Any:
        return {"loss": super().forward(*parts).loss, "rest": None}


NESTED: list[tuple[Any, Any]] = [
    (Nested, {"inputs": [{"x": X}, MASK], "labels": Y}),
    (Nested, {"inputs": ({"x": X}, None), "labels": Y}),
    (Nested, Encoding({"inputs": [Encoding({"x": X}), None], "labels": Y, "name": None})),
    (Attributes, Encoding(NAMED)),
    (Listed, ([X, MASK, Y],)),
    (Listed, ((X, None, Y),)),
]


@one_of(2)
@pytest.mark.parametrize(("kind", "batch"), NESTED)
def test_a_model_may_take_any_structure_as_it_is(kind: Any, batch: Any) -> None:
    given = batch if isinstance(batch, tuple) else (batch,)
    made = kind()
    output = copy.deepcopy(made)(*given)
    wanted = output["loss"] if isinstance(output, dict) else output.loss

    found = trained(made, None, batch, lambda step: step(*given))

    assert found == pytest.approx([wanted.item()], rel=1e-12)


@pytest.mark.parametrize("loss_fn", [None, functional.mse_loss])
def test_microbatches_and_stages_get_keywords(loss_fn: Any) -> None:
    batches = [
        {"x": torch.randn(4, 3).double(), "mask": None, "labels": torch.randn(4, 3).double()}
        for _ in range(3)
    ]
    model = Net()
    optimizer = SGD(model.parameters())
    wanted = plain_losses(optimizer, batches, lambda **batch: model(**batch).loss)

    found = piper.rehearse(Net(), loss_fn, PIPELINE(), batches, optimizer=SGD, reduction="mean")

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-12, atol=0)


def test_a_weight_is_given_the_batch_as_the_step_was() -> None:
    seen = []

    def weight(x: Tensor, labels: Tensor, mask: Any = None) -> float:
        seen.append((x.shape[0], labels.shape[0], mask))
        return 1.0

    batch = {"x": X, "labels": Y}
    piper.rehearse(Net(), functional.mse_loss, PIPELINE(), [batch], loss_weight=weight)
    piper.rehearse(Net(), functional.mse_loss, PIPELINE(), [(X, Y)], loss_weight=weight)

    assert seen == [(2, 2, None)] * 4


def test_a_weight_that_cannot_take_the_batch_says_how_it_is_called() -> None:
    with pytest.raises(InputError, match=r"keywords \(x, labels\)") as error:
        piper.rehearse(
            Net(), functional.mse_loss, PIPELINE(), [{"x": X, "labels": Y}],
            loss_weight=lambda *microbatch: 1.0,
        )  # fmt: skip

    assert "loss_weight=lambda labels, **rest" in str(error.value)


class Strict(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"x": X, "target": Y},
            "batch: loss_fn needs an entry 'labels', and the batch has x, target\n"
            "  fix: rename the entry, or write step(inputs, labels)",
        ),
        (
            {"y": X, "labels": Y},
            "example: Strict.forward(x) cannot be called with y; labels are for loss_fn\n"
            "  fix: name entries as the model does, or give them by position",
        ),
    ],
)
def test_labels_that_cannot_be_found_are_an_error(example: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        piper.Trainer(Strict(3, 3).double(), functional.mse_loss, example=example)

    assert str(error.value) == message


def test_an_output_without_a_loss_is_an_error() -> None:
    with pytest.raises(piper.errors.PiperError, match="not a scalar loss") as error:
        piper.Trainer(Net(), None, example={"x": X})

    assert "a dict with labels" in str(error.value)


NO_WEIGHTS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None"),
    "a vector": (torch.ones(4), r"a tensor \[4\]"),
    "nan": (float("nan"), "nan"),
    "infinite": (torch.tensor(float("inf")), r"a tensor \[\]"),
    "a text": ("4 rows", "'4 rows'"),
}


@pytest.mark.parametrize(("given", "said"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_a_weight_that_is_no_number_is_refused(given: Any, said: str) -> None:
    strategy = [piper.Place(piper.where(), [0]), piper.Split("MB", 2)]
    batch, mse = (torch.randn(8, 3), torch.randn(8, 3)), nn.functional.mse_loss

    with pytest.raises(InputError, match=f"loss_weight: it returns {said} for a microbatch"):
        piper.rehearse(nn.Linear(3, 3), mse, strategy, [batch], loss_weight=lambda *_: given)
