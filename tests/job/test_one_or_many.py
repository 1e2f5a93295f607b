"""One batch where many are wanted, many where one is: the message says what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import piper
from piper.errors import InputError
from piper.job.other_attributes import FIXES

X, Y = torch.randn(4, 3), torch.randn(4, 3)
DICT = {"x": X, "labels": Y}
DATA = TensorDataset(X, Y)
LOADER: DataLoader[Any] = DataLoader(DATA, batch_size=2)
Call = Callable[[piper.Trainer], Any]


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return functional.mse_loss(self.layer(x), x if labels is None else labels)


@pytest.fixture(scope="module")
def given() -> Iterator[piper.Trainer]:
    """With a loss function: a batch is (x, y)."""
    trainer = piper.Trainer(nn.Linear(3, 3), functional.mse_loss, example=(X, Y), device="cpu")
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def own() -> Iterator[piper.Trainer]:
    """With the model's own loss: a batch is a dict."""
    trainer = piper.Trainer(OwnLoss(), None, example=DICT, device="cpu")
    yield trainer
    trainer.close()


PAIRS = "it takes a loader or a list of batches: write trainer.evaluate([(x, y)])"
WHOLE = "it takes a loader or a list of batches: write trainer.evaluate([batch])"
SEVERAL = "give a DataLoader, or a list [(x, y), ...]"
STEPS = "write `for batch in loader: trainer.step(batch)`"
PREDICTIONS = "write `for inputs in loader: trainer.predict(inputs)`"
EXAMPLE = "give it what the example has"


@one_of(3)
@pytest.mark.parametrize(
    ("call", "what", "fix"),
    [
        (lambda t: t.evaluate((X, Y)), "one batch, the tuple (Tensor, Tensor)", PAIRS),
        (lambda t: t.evaluate([X, Y]), "one batch, the list [Tensor, Tensor]", PAIRS),
        (lambda t: t.evaluate(X), "one batch, a tensor of shape [4, 3]", WHOLE),
        (lambda t: t.evaluate(DICT), "one batch, a dict", WHOLE),
        (lambda t: t.evaluate(DATA), "a data set, which has samples and no batches",
         "write trainer.evaluate(DataLoader(dataset, batch_size=...))"),
        (lambda t: t.evaluate(None), "its batches are None", SEVERAL),
        (lambda t: t.evaluate(3), "its batches are of type int", SEVERAL),
        (lambda t: t.evaluate("val"), "its batches are of type str", SEVERAL),
        (lambda t: t.evaluate([]), "there are no batches", "give at least one batch"),
        (lambda t: t.evaluate(iter([])), "there are no batches", "give at least one batch"),
        (lambda t: t.evaluate(enumerate(LOADER)), "batch 0: it is a number and a batch",
         "write trainer.evaluate(loader), without enumerate"),
        (lambda t: t.evaluate([(X, Y), LOADER]), "evaluate, batch 1: it is of type DataLoader",
         "give a batch: a tuple (x, y), or a dict"),
        (lambda t: t.evaluate(one for one in [X]), "batch 0: it is one tensor", "give (x, y)"),
        (lambda t: t.step(LOADER), "one batch, and what it was given is of type DataL", STEPS),
        (lambda t: t.step(DATA), "what it was given is of type TensorDataset", STEPS),
        (lambda t: t.step(iter(LOADER)), "what it was given is an iterator", STEPS),
        (lambda t: t.step(one for one in LOADER), "what it was given is an iterator", STEPS),
        (lambda t: t.step([(X, Y), (X, Y)]), "is the list [tuple, tuple]", STEPS),
        (lambda t: t.step([DICT, DICT]), "is the list [dict, dict]", STEPS),
        (lambda t: t.step((0, [X, Y])), "a number and a batch, as enumerate gives them",
         "write `for number, batch in enumerate(loader): trainer.step(batch)`"),
        (lambda t: t.step(), "step: it was given nothing", EXAMPLE),
        (lambda t: t.step([]), "step: it was given nothing", EXAMPLE),
        (lambda t: t.step({}), "step: it was given nothing", EXAMPLE),
        (lambda t: t.step(None), "step: its batch is None", EXAMPLE),
        (lambda t: t.predict(LOADER), "predict: it takes one batch", PREDICTIONS),
        (lambda t: t.predict([(X,), (X,)]), "predict: it takes one batch", PREDICTIONS),
        (lambda t: t.predict(None), "predict: its batch is None", EXAMPLE),
        (lambda t: t.predict({"input": X, "labels": Y}), "does not take the entry 'labels'",
         "leave out the labels"),
        (lambda t: t.load(nn.Linear(3, 3).state_dict()), "a value of type OrderedDict, and not a",
         "model.load_state_dict(weights), before you make the Trainer"),
        (lambda t: t.predict(X, Y), "the model takes 1 input, and got 2", "leave out the labels"),
    ],
)  # fmt: skip
def test_a_loader_is_told_from_a_batch(
    given: piper.Trainer, call: Call, what: str, fix: str
) -> None:
    with pytest.raises(InputError) as error:
        call(given)

    told, _, advice = str(error.value).partition("\n  fix: ")
    assert what in told
    assert fix in advice


@pytest.mark.parametrize("batches", [DICT, X, (X, None, Y), (X, Y)])
def test_batches_of_a_model_with_its_own_loss(own: piper.Trainer, batches: Any) -> None:
    with pytest.raises(InputError, match="evaluate: it was given one batch"):
        own.evaluate(batches)


def test_rehearse_takes_batches_too() -> None:
    model = nn.Linear(3, 3)

    for batches, what in [((X, Y), "one batch"), (DICT, "one batch"), ([], "there are no")]:
        with pytest.raises(InputError, match=what):
            piper.rehearse(model, functional.mse_loss, None, batches)  # type: ignore[arg-type]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from LOADER


@pytest.mark.parametrize(
    "batches",
    [[(X, Y)], ((X, Y),), LOADER, iter([(X, Y)]), Stream(), [[X, Y]]],
)
def test_anything_that_gives_batches_is_right(given: piper.Trainer, batches: Any) -> None:
    with torch.no_grad():
        wanted = functional.mse_loss(own_layer(given)(X), Y)

    assert given.evaluate(batches).loss == pytest.approx(float(wanted))


def own_layer(trainer: piper.Trainer) -> nn.Linear:
    layer, found = nn.Linear(3, 3), trainer.state_dict()
    assert found is not None
    layer.load_state_dict(found)
    return layer


def test_tensors_are_batches_of_a_model_that_takes_one() -> None:
    trainer = piper.Trainer(OwnLoss(), None, example=X, device="cpu")

    found = [trainer.evaluate(batches).loss for batches in ([X, X], (X,), [(X,), (X,)])]

    assert found == pytest.approx([found[0]] * 3)
    trainer.close()


@pytest.mark.parametrize("name", FIXES)
def test_a_trainer_says_what_to_write_for_names_of_others(given: piper.Trainer, name: str) -> None:
    with pytest.raises(InputError) as error:
        getattr(given, name)

    assert str(error.value) == f"trainer: it has no {name}\n  fix: {FIXES[name]}"
    assert not hasattr(given, name)


def test_a_trainer_is_not_called(given: piper.Trainer) -> None:
    """As DeepSpeed's engine is."""
    with pytest.raises(InputError, match=r"it is not a function\n  fix: write trainer\.step"):
        given(X)  # type: ignore[operator]


def test_misspelt_names_are_as_in_python(given: piper.Trainer) -> None:
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'stpe'") as error:
        given.stpe  # type: ignore[attr-defined]  # noqa: B018

    assert error.value.name == "stpe"


def test_metrics_are_read_by_name(given: piper.Trainer) -> None:
    metrics = given.step(X, Y)

    assert metrics["loss"] == metrics.loss and metrics["tokens"] is None
    with pytest.raises(KeyError, match=r"there is no 'los', only step, loss"):
        metrics["los"]
