"""A loop that uses parameters of its model, whose trained values are in the Trainer, is told so."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper import Trainer
from piper.job.loop.stale_tensors import StaleTensors

Use = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def clipped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-9.0, 9.0)


def assigned(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.tril()


@torch.no_grad()
def masked(model: nn.Module) -> None:
    model[0].weight.mul_(torch.ones(3, 3))


@torch.no_grad()
def averaged(model: nn.Module) -> None:
    for mine, other in zip(net().parameters(), model.parameters(), strict=True):
        mine.lerp_(other, 0.1)


def replaced(model: nn.Module) -> None:
    net()[0].load_state_dict(model[0].state_dict())


VALUES: dict[str, Use] = {
    "clipped": clipped, "assigned": assigned, "masked": masked, "averaged": averaged,
    "replaced": replaced, "copied": copy.deepcopy, "pickled": pickle.dumps,
    "a layer copied": lambda model: copy.deepcopy(model[2]),
    "norm": lambda model: sum(p.norm() for p in model.parameters()),
    "a number": lambda model: model[2].bias.item(), "a list": lambda model: model[2].bias.tolist(),
    "printed": lambda model: repr(model[2].bias), "detached": lambda model: model[2].bias.detach(),
    "an element": lambda model: model[2].bias[0], "a sum": lambda model: 1.0 + model[2].bias,
    "numpy": lambda model: model[1].running_mean.numpy(),
    "a buffer": lambda model: model[1].running_mean.mean(),
    "stacked": lambda model: torch.stack([model[0].bias, model[1].bias]),
    "a layer called": lambda model: model[0](torch.ones(1, 3)),
    "as a vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}  # fmt: skip
SIZES: dict[str, Use] = {
    "devices": lambda model: next(model.parameters()).device,
    "sizes": lambda model: sum(p.numel() for p in model.parameters()),
    "shapes": lambda model: [(p.shape, p.dtype, p.dim(), p.size(0)) for p in model.parameters()],
    "trained": lambda model: [name for name, p in model.named_parameters() if p.requires_grad],
    "gradients": lambda model: [p.grad for p in model.parameters()],
    "frozen": lambda model: setattr(model[0].bias, "requires_grad", False),
    "the model printed": repr, "a set": lambda model: set(model.parameters()),
    "modes": lambda model: (model.train(), model.zero_grad()),
    "tied": lambda model: {p.data_ptr() for p in model.parameters()},
}  # fmt: skip


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def model(told: list[str]) -> Iterator[nn.Module]:
    found = net()
    stale = StaleTensors(found, lambda: told.append("told"))
    stale.mark()
    yield found
    stale.clear()
    assert {type(one) for one in (*found.parameters(), *found.buffers())} == {nn.Parameter, Tensor}


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES)
def test_whoever_uses_values_is_told(use: Use, model: nn.Module, told: list[str]) -> None:
    use(model)

    assert told


@pytest.mark.parametrize("use", SIZES.values(), ids=SIZES)
def test_nobody_who_asks_for_sizes_is_told(use: Use, model: nn.Module, told: list[str]) -> None:
    use(model)

    assert not told


def test_copies_are_as_usual(model: nn.Module, told: list[str]) -> None:
    copied = copy.deepcopy(model)
    told.clear()
    copied[0](torch.ones(1, 3)).sum().backward()

    assert not told
    assert {type(one) for one in copied.parameters()} == {nn.Parameter}
    for one, other in zip(copied.parameters(), net().parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3), torch.randn(rows, 1)


def warned(loop: Callable[[Trainer, nn.Module, list[nn.Parameter]], Any]) -> list[str]:
    """What a loop is told, and where."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = list(model.parameters())
    trainer = Trainer(model, nn.functional.mse_loss, example=batch())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.step(*batch())
            loop(trainer, model, before)
    trainer.close()
    model.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).state_dict())
    assert {type(one) for one in model.parameters()} == {nn.Parameter}
    return [f"{str(one.message)[:36]} {one.filename.rpartition('/')[2]}" for one in found]


OLD = "the parameters and buffers of this m test_stale_tensors.py"


def test_a_loop_is_told_once_and_where() -> None:
    assert warned(lambda *_: clipped(_[1])) == [OLD]


def test_parameters_that_were_taken_before_count_too() -> None:
    assert warned(lambda trainer, model, before: before[0].sum()) == [OLD]


def test_weights_that_were_loaded_are_those_of_now() -> None:
    def loop(trainer: Trainer, model: nn.Module, before: list[nn.Parameter]) -> None:
        model.load_state_dict(trainer.state_dict() or {})
        model(batch()[0])
        before[0].sum()

    assert warned(loop) == []


def test_calls_of_the_trainer_are_quiet() -> None:
    def loop(trainer: Trainer, model: nn.Module, before: list[nn.Parameter]) -> None:
        trainer.evaluate([batch()])
        trainer.predict(batch()[0])
        trainer.state_dict()
        model.to(torch.float32)
        trainer.step(*batch(2))  # captured again

    assert warned(loop) == []
