"""A loss may read what the forward has left in the model, or in the loss itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper import rehearse
from piper.errors import CaptureError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, Tensor], Tensor]


class Gate(nn.Module):
    """Leaves a loss of its own, as routers of experts do."""

    def __init__(self, before: Any = 0.0) -> None:
        super().__init__()
        self.linear, self.aux, self.rows = nn.Linear(4, 2), before, 0

    def forward(self, x: Tensor) -> Tensor:
        shares = self.linear(x).softmax(-1)
        self.aux, self.rows = shares.square().mean(), x.shape[-1]
        return x * shares[..., :1]


class Net(nn.Module):
    def __init__(self, before: Any = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Gate(before), nn.Linear(4, 4), Gate(before)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def criterion(self, output: Tensor, wanted: Tensor) -> Tensor:
        return mse_loss(output, wanted) + self.blocks[1].aux


class Held(nn.Module):
    def __init__(self, model: nn.Module, as_list: bool) -> None:
        super().__init__()
        self.model: Any = [model] if as_list else model

    def forward(self, output: Tensor, wanted: Tensor) -> Tensor:
        model = self.model[0] if isinstance(self.model, list) else self.model
        return mse_loss(output, wanted) + model.blocks[1].aux


class Features:
    """Reads what a hook has kept."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: Tensor | None = None
        model.blocks[0].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.kept = output

    def __call__(self, output: Tensor, wanted: Tensor) -> Tensor:
        more = 0.0 if self.kept is None else mse_loss(self.kept, wanted)
        return mse_loss(output, wanted) + more


def one(model: nn.Module) -> Loss:
    return lambda output, wanted: mse_loss(output, wanted) + 0.1 * model.blocks[1].aux


def all_gates(model: nn.Module) -> Loss:
    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        found = [m.aux for m in model.modules() if hasattr(m, "aux") and m.aux is not None]
        return mse_loss(output, wanted) + 0.1 * sum(found)

    return loss


def a_layer(model: nn.Module) -> Loss:
    gate = model.blocks[3]
    return lambda output, wanted: mse_loss(output, wanted) + gate.aux


def a_number(model: nn.Module) -> Loss:
    return lambda output, wanted: mse_loss(output, wanted) * model.blocks[1].rows


READING: dict[str, Callable[[nn.Module], Loss]] = {
    "one": one, "all gates": all_gates, "a layer": a_layer, "a number": a_number,
    "a method": lambda model: model.criterion, "features": Features,
    "a module that has it": lambda model: Held(model, as_list=False),
    "a module with a list": lambda model: Held(model, as_list=True),
}  # fmt: skip


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(2, 8, 4, generator=draw).double()) for _ in range(3)]  # type: ignore[misc]


def plain(model: nn.Module, loss_fn: Loss) -> list[float]:
    optimizer, losses = SGD(model.parameters()), []
    for x, y in batches():
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CASES = [(name, 0.0, pp) for pp in (2, 1) for name in READING] + [("all gates", None, 2)]


@one_of(2)
@pytest.mark.parametrize(("name", "before", "pp"), every(7, CASES))
def test_what_a_forward_left_is_trained(name: str, before: Any, pp: int) -> None:
    model = Net(before)
    state = copy.deepcopy(model.state_dict())
    strategy = one_f_one_b(pp=pp, microbatches=4)

    found = rehearse(model, READING[name](model), strategy, batches(), optimizer=SGD)

    assert [gate.aux for gate in model.blocks[1::2]] == [before] * 2  # as it was
    wanted = Net(before)
    wanted.load_state_dict(state)
    assert found.losses == pytest.approx(plain(wanted, READING[name](wanted)), rel=1e-12)
    for key, parameter in wanted.named_parameters():
        torch.testing.assert_close(found.parameters[key], parameter.detach(), rtol=0, atol=1e-12)


def test_a_model_that_the_loss_has_keeps_its_type() -> None:
    model = Net().float()
    loss = Held(model, as_list=False)
    loss.register_buffer("weight", torch.ones(4))
    some = [(x.float(), y.float()) for x, y in batches()]

    rehearse(model, loss, one_f_one_b(pp=1, microbatches=2), some, optimizer=SGD)

    assert {one.dtype for one in (*loss.parameters(), *loss.buffers())} == {torch.float32}


def setting(model: nn.Module) -> Loss:
    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        model.eval()
        return mse_loss(output, wanted)

    return loss


def test_a_loss_that_changes_the_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()

    with pytest.raises(CaptureError, match="training"):
        rehearse(model, setting(model), one_f_one_b(pp=1, microbatches=1), batches(), optimizer=SGD)

    assert model.training
