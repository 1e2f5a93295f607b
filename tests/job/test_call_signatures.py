"""A batch that the model or its loss cannot be called with is an error: what to write instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draws import drawn, draws
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Trainer
from piper.capture.trace.arguments.call_arguments import Keywords
from piper.errors import InputError, PiperError
from piper.job.batch.call_signatures import refuse_wrong_calls

X, Y = torch.ones(4, 3), torch.zeros(4, 3)
MODEL_FIRST = "what the model takes, and then the labels"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class OwnLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(self.layer(x), y)


class OneList(Net):
    def forward(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
        return F.mse_loss(self.layer(batch[0]), batch[1])


EXAMPLES: list[tuple[type[nn.Module], Any, Any, str, str]] = [
    (Net, F.mse_loss, (X, X, Y), "example: Net.forward(x) cannot be called with 2", MODEL_FIRST),
    (Net, F.mse_loss, ([X, Y],), "called with 0 inputs; the last argument", "write (x, y)"),
    (Net, F.mse_loss, {"z": X, "labels": Y}, "called with z", "name entries"),
    (OwnLoss, None, (X, Y, Y), "OwnLoss.forward(x, y) cannot be called with 3", "those that"),
    (Net, None, (X, Y), "Net.forward(x) cannot be called with 2 inputs", "give a loss_fn, which"),
    (OwnLoss, None, (X,), "called with 1 input", "those that the model takes"),
    (OwnLoss, None, ([X, Y],), "called with 1 input", "in a list of their own: write (*inputs)"),
    (OwnLoss, F.mse_loss, ((X, X), Y), "called with 1 input", "own: write (*inputs, y)"),
    (OwnLoss, None, {"x": X, "z": Y}, "called with x, z", "name entries as the model does"),
    (Net, F.mse_loss, {"x": X, "z": X, "labels": Y}, "called with x, z; labels", "leave out z, "),
    (OneList, None, (X, Y), "OneList.forward(batch)", "write ([a, b],) if it takes one list"),
    (OneList, None, [X, Y], "called with 2 inputs", "write ([a, b],) if it takes one list"),
    (Net, lambda o: o.mean(), (X, Y), "loss_fn: <lambda>(o)", "loss_fn(output, labels)"),
    (Net, lambda o, a, b: o, (X, Y, Y), "<lambda>(o, a, b)", "several labels are one tuple"),
    (Net, nn.ReLU(), (X, Y), "ReLU.forward(input)", "write loss_fn(output, labels)"),
]


@pytest.mark.parametrize(("model", "loss_fn", "example", "what", "fix"), EXAMPLES)
def test_wrong_examples(
    model: type[nn.Module], loss_fn: Any, example: Any, what: str, fix: str
) -> None:
    with pytest.raises(InputError) as error:
        Trainer(model(), loss_fn, example=example, device="cpu")

    assert what in str(error.value)
    assert fix in str(error.value)


class Open(Net):
    """It takes any names, as models of transformers do, and misses what it needs later."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **more: object
    ) -> Tensor:
        return F.mse_loss(self.layer(input_ids), labels)


def test_an_entry_that_is_nearly_a_parameter_is_named() -> None:
    with pytest.raises(PiperError) as found:
        Trainer(Open(), None, example={"input_idz": X, "labels": Y}, device="cpu")

    assert "Open.forward names no input_idz\n  fix: write input_ids in place of" in str(found.value)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    made = Trainer(Net(), F.mse_loss, example=(X, Y), device="cpu")
    yield made
    made.close()


CALLS: list[tuple[Callable[[Trainer], Any], str]] = [
    (
        lambda t: t.step(X, X, Y),
        "step was given 3 arguments, but the example has 2: Net",
    ),
    (
        lambda t: t.step([X, X, Y]),
        "step was given 3 arguments, but the example has 2: Net",
    ),
    (lambda t: t.step(X), "step was given 1 argument, but the example has 2"),
    (lambda t: t.step([X]), "step was given 1 argument, but the example has 2"),
    (lambda t: t.step(z=X, labels=Y), "called with z; labels are for loss_fn"),
    (lambda t: t.step(X, Y, x=X), "Net.forward(x) cannot be called with x"),
    (lambda t: t.evaluate([(X, X, Y)]), "cannot be called with 2 inputs"),
    (lambda t: t.predict(X, Y), "leave out the labels"),
    (lambda t: t.predict(X, Y, Y), "predict: Net.forward(x) cannot be called with 3 inputs"),
    (lambda t: t.predict(), "cannot be called with 0 inputs"),
    (lambda t: t.predict(z=X), "cannot be called with z"),
]


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_wrong_calls(trainer: Trainer, call: Callable[[Trainer], Any], text: str) -> None:
    with pytest.raises(InputError) as error:
        call(trainer)

    assert text in str(error.value)


def test_after_a_wrong_call_training_goes_on(trainer: Trainer) -> None:
    with pytest.raises(InputError):
        trainer.step(X, X, Y)

    assert trainer.step(X, Y).loss > 0


def test_a_model_that_takes_one_list_gets_it() -> None:
    trainer = Trainer(OneList(), None, example=([X, Y],), device="cpu")

    assert trainer.step([X, Y]).loss > 0


def test_hooks_may_change_what_a_forward_is_called_with() -> None:
    model = OwnLoss()
    model.register_forward_pre_hook(lambda _, given: tuple(given[0]))

    trainer = Trainer(model, None, example=([X, Y],), device="cpu")

    assert trainer.step([X, Y]).loss > 0


def module_of(parameters: str) -> nn.Module:
    """A model whose forward has these parameters."""
    made: dict[str, Any] = {}
    exec(f"def forward(self{parameters}): return None", made)
    return type("Made", (nn.Module,), {"forward": made["forward"]})()


def parameters_of(rng: random.Random) -> str:
    count = rng.randrange(4)
    free = rng.randrange(count + 1)
    names = [f"{name}=None" if k >= free else name for k, name in enumerate("abc"[:count])]
    rest = rng.choice([[], ["*rest"], ["*", "d"], ["*", "d=None"], ["*rest", "d"], ["**more"]])
    return "".join(f", {one}" for one in [*names, *rest])


@drawn
def test_what_python_can_call_is_accepted_and_nothing_else() -> None:
    for seed in range(draws(150, 3000)):
        rng = random.Random(seed)
        parameters = parameters_of(rng)
        model, given = module_of(parameters), (X,) * rng.randrange(5)
        named = {name: X for name in "abcde" if rng.random() < 0.2}
        try:
            model(*given, **named)
            works = True
        except TypeError:
            works = False

        arguments = (Keywords(named), *given) if named else given
        loss_fn = rng.choice([None, F.mse_loss])
        labels = () if loss_fn is None else (Y,)
        try:
            refuse_wrong_calls(model, loss_fn, (*arguments, *labels), "batch", None)
            accepted = True
        except InputError as error:
            accepted = False
            assert "fix:" in str(error)

        assert accepted == works, (parameters, len(given), list(named))
