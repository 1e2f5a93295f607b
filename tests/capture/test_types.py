"""Code that asks for the type of a tensor or a number takes the way of eager training."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse

SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self, asked: Callable[[Net, Tensor], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.asked = nn.Linear(4, 4), asked
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * 2 if self.asked(self, h) else h.tanh()


def by_pattern(_: Net, h: Tensor) -> bool:
    match type(h):
        case type() as kind:
            return kind is Tensor
        case _:
            return False


def by_new_class(net: Net, h: Tensor) -> bool:
    made: Any = type("Made", (nn.Module,), {"kind": type(net.linear.bias)})
    return bool(made.kind is nn.Parameter) and issubclass(made, nn.Module)


FORMS: dict[str, Callable[[Net, Any], Any]] = {
    "is a tensor": lambda _, h: type(h) is Tensor,
    "equals a tensor": lambda _, h: type(h) == torch.Tensor,  # noqa: E721
    "is one of several": lambda _, h: type(h) in (list, tuple, Tensor),
    "a table of types": lambda _, h: {list: False, Tensor: True}.get(type(h), False),
    "its name": lambda _, h: type(h).__name__ == "Tensor",
    "its module": lambda _, h: type(h).__module__ == "torch",
    "a parameter": lambda net, _: type(net.linear.weight) is nn.Parameter,
    "a tensor that is no parameter": lambda net, _: type(net.linear.weight * 1) is nn.Parameter,
    "a buffer": lambda net, _: type(net.count) is Tensor,
    "a module": lambda net, _: type(net.linear) is nn.Linear,
    "a whole number": lambda net, _: type(net.count.item()) is int,
    "a number": lambda _, h: type(h.sum().item()) is float,
    "no whole number": lambda _, h: type(h.sum().item()) is int,
    "a size": lambda _, h: type(h.shape[0]) is int and type(h.shape) is torch.Size,
    "of its type": lambda _, h: type(h) is type(h + 1),
    "a type is a type": lambda _, h: isinstance(type(h), type) and type is type(type(h)),
    "a pattern": by_pattern,
    "a new class": by_new_class,
    "its class": lambda _, h: h.__class__ is Tensor,
    "its class by text": lambda _, h: getattr(h, "__class__") == torch.Tensor,  # noqa: B009
    "its class in a table": lambda _, h: h.__class__ in {Tensor: True},
    "the name of its class": lambda _, h: h.__class__.__name__ == "Tensor",
    "the class of a parameter": lambda net, _: net.linear.weight.__class__ is nn.Parameter,
    "the class of a buffer": lambda net, _: net.count.__class__ is nn.Parameter,
    "the class of a module": lambda net, _: net.linear.__class__ is nn.Linear,
    "the class of a number": lambda net, _: net.count.item().__class__ is int,
    "one class": lambda _, h: h.__class__ is (h + 1).__class__ is type(h),
    "an instance of its class": lambda _, h: isinstance(h, h.__class__),
    "a generic": lambda _, h: type[int] == type[int] and type(h).__mro__[0] is Tensor,
}


@one_of(8)
@pytest.mark.parametrize("name", FORMS)
def test_types_decide_as_without_piper(name: str) -> None:
    model = Net(FORMS[name])
    plain = deepcopy(model)
    torch.manual_seed(1)
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]

    found = rehearse(model, F.mse_loss, None, batches, optimizer=SGD)

    wanted = plain_losses(SGD(plain.parameters()), batches, lambda x, y: F.mse_loss(plain(x), y))
    assert found.losses == pytest.approx(wanted, rel=1e-6)
    assert "type" not in globals()


def test_a_loss_may_ask_too() -> None:
    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        if type(output) is not Tensor or type(wanted) is not Tensor:
            return output.sum() * 0
        return F.mse_loss(output, wanted)

    torch.manual_seed(1)
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2)]
    assert min(rehearse(nn.Linear(4, 4), loss, None, batches, optimizer=SGD).losses) > 0
