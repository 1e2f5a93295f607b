"""Trainers that share a model train copies of it: whoever expects otherwise is told so."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

from piper import Trainer
from piper.errors import InputError

SGD = partial(torch.optim.SGD, lr=0.3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    return x, y


def trainer(model: nn.Module, loss: Any = mse_loss) -> Trainer:
    return Trainer(model, loss, example=batch(), optimizer=SGD)


def stepped(model: nn.Module, loss: Any = mse_loss) -> Trainer:
    made = trainer(model, loss)
    made.step(*batch())
    return made


def one_after_another(model: nn.Module) -> None:
    stepped(model).close()
    stepped(model, l1_loss)


def beside_another(model: nn.Module) -> None:
    first = stepped(model)
    stepped(model, l1_loss)
    first.close()


def in_turn(model: nn.Module) -> None:
    first, second = trainer(model), trainer(model, l1_loss)
    first.step(*batch())
    second.step(*batch())


def a_part_first(model: nn.Module) -> None:
    stepped(model[0]).close()
    stepped(model)


def a_part_later(model: nn.Module) -> None:
    stepped(model).close()
    stepped(nn.Sequential(model[1], nn.Tanh()))


def loaded_and_in_turn(model: nn.Module) -> None:
    first = stepped(model)
    model.load_state_dict(first.state_dict())
    second = stepped(model)
    first.step(*batch())
    second.close()


def a_discriminator(model: nn.Module) -> None:
    judge = trainer(model)
    model.requires_grad_(False)
    other = trainer(net(), lambda output, target: mse_loss(model(output), target))
    model.requires_grad_(True)
    judge.step(*batch())
    model.requires_grad_(False)
    other.step(*batch())


def a_discriminator_before(model: nn.Module) -> None:
    judge = stepped(model)
    model.requires_grad_(False)
    stepped(net(), lambda output, target: mse_loss(model(output), target))
    judge.close()


def a_plain_loop_later(model: nn.Module) -> None:
    stepped(model).close()
    mse_loss(model(batch()[0]), batch()[1]).backward()


def a_layer_later(model: nn.Module) -> None:
    stepped(model).close()
    model[0](batch()[0])


def saved_later(model: nn.Module) -> None:
    stepped(model).close()
    model.state_dict()


def loaded_before_the_last_step(model: nn.Module) -> None:
    start = copy.deepcopy(model.state_dict())
    first = trainer(model)
    model.load_state_dict(start)
    first.step(*batch())
    first.close()
    stepped(model)


WARNED: dict[Callable[[Any], None], str] = {
    one_after_another: "starts with the weights from before",
    beside_another: "starts with the weights from before",
    a_part_first: "starts with the weights from before",
    a_part_later: "starts with the weights from before",
    loaded_before_the_last_step: "starts with the weights from before",
    in_turn: "two Trainers train the same parameters",
    loaded_and_in_turn: "two Trainers train the same parameters",
    a_plain_loop_later: "still has the weights that it had",
    a_layer_later: "older than those that are trained",
    saved_later: "still has the weights that it had",
}


def told(loop: Callable[[Any], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop(net())
    assert all(one.filename == __file__ for one in seen)
    return [str(one.message) for one in seen]


@one_of(2)
@pytest.mark.parametrize("loop", WARNED)
def test_who_expects_one_model_is_told(loop: Callable[[Any], None]) -> None:
    found = told(loop)
    assert len(found) == 1
    assert WARNED[loop] in found[0]


@pytest.mark.parametrize("loop", [a_discriminator, a_discriminator_before])
def test_a_loss_that_reads_what_another_one_trains_is_refused(loop: Callable[[Any], None]) -> None:
    with pytest.raises(InputError, match="it reads a model that another Trainer trains"):
        loop(net())


def loaded_between(model: nn.Module) -> None:
    first = stepped(model)
    weights = first.state_dict()
    first.close()
    model.load_state_dict(weights)
    model(batch()[0])
    stepped(model, l1_loss).close()


def never_stepped(model: nn.Module) -> None:
    trainer(model).close()
    stepped(model)


def copies(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    stepped(model).close()
    stepped(other)


def a_frozen_part(model: nn.Module) -> None:
    """Both use the first layer, and neither trains it."""
    model[0].requires_grad_(False)
    stepped(model).close()
    stepped(nn.Sequential(model[0], nn.Linear(3, 3)))


def a_discriminator_that_is_loaded(model: nn.Module) -> None:
    judge, frozen = trainer(model), copy.deepcopy(model).requires_grad_(False)
    other = trainer(net(), lambda output, target: mse_loss(frozen(output), target))
    for seed in range(2):
        judge.step(*batch(seed))
        frozen.load_state_dict(judge.state_dict())
        other.step(*batch(seed))


def first_weights_again(model: nn.Module) -> None:
    """Two strategies are compared."""
    first = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.load_state_dict(first)
        stepped(model).close()


def first_weights_again_in_a_plain_loop(model: nn.Module) -> None:
    first = copy.deepcopy(model.state_dict())
    stepped(model).close()
    model.load_state_dict(first)
    mse_loss(model(batch()[0]), batch()[1]).backward()


def first_weights_again_after_another_warning(model: nn.Module) -> None:
    first = copy.deepcopy(model.state_dict())
    made = stepped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(batch()[0])
    made.close()
    model.load_state_dict(first)
    stepped(model)


QUIET = [
    first_weights_again_after_another_warning,
    loaded_between, never_stepped, copies, a_frozen_part, a_discriminator_that_is_loaded,
    first_weights_again, first_weights_again_in_a_plain_loop,
]  # fmt: skip


@one_of(2)
@pytest.mark.parametrize("loop", QUIET)
def test_who_loads_the_weights_is_not(loop: Callable[[Any], None]) -> None:
    assert told(loop) == []


def test_loaded_weights_are_where_the_next_one_starts() -> None:
    model, plain = net(), net()
    optimizer = SGD(plain.parameters())
    for seed, loss_fn in enumerate((mse_loss, l1_loss)):
        trained = trainer(model, loss_fn)
        loss = loss_fn(plain(batch(seed)[0]), batch(seed)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trained.step(*batch(seed)).loss == pytest.approx(loss.item(), rel=1e-6)
        weights = trained.state_dict()
        trained.close()
        model.load_state_dict(weights)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
        assert type(mine) is nn.Parameter
