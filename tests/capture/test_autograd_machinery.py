"""What a model does to autograd itself while it runs: as in eager training, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from piper import rehearse
from piper.errors import CaptureError

WIDTH = 4
SGD = partial(torch.optim.SGD, lr=0.5)


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.change = change
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.change(self, self.first(x))))


Change = Callable[[Any, Tensor], Tensor]


class Halved(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is torch.ops.aten.tanh.default else found


class Named(Tensor):
    pass


def in_mode(net: Net, h: Tensor) -> Tensor:
    with Halved():
        return torch.tanh(h)


def saved_coarsely(net: Net, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 4).round() / 4, lambda t: t):
        return torch.sin(h) ** 2


def data_of_output(net: Net, h: Tensor) -> Tensor:
    h.data = h.data.clamp(-0.3, 0.3)
    return h


def data_of_parameter(net: Net, h: Tensor) -> Tensor:
    net.last.weight.data = F.normalize(net.last.weight.data, dim=1)
    return h


def data_and_back(net: Net, h: Tensor) -> Tensor:
    kept = net.last.weight.data
    net.last.weight.data = kept.sign()
    found = net.last(h)
    net.last.weight.data = kept
    return found


def from_a_vector(net: Net, h: Tensor) -> Tensor:
    vector = nn.utils.parameters_to_vector(net.last.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, net.last.parameters())
    return h


def hooked_node(net: Net, h: Tensor) -> Tensor:
    h = 2 * h
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(g * 0.1 for g in grads))
    return h


def hooked_deeper(net: Net, h: Tensor) -> Tensor:
    h = 2 * h
    if h.grad_fn is not None:
        h.grad_fn.next_functions[0][0].register_hook(lambda *grads: None)
    return h


def frozen_in_between(net: Net, h: Tensor) -> Tensor:
    net.last.requires_grad_(False)
    found = net.last(h)
    net.last.requires_grad_(True)
    return found


def thawed(net: Net, h: Tensor) -> Tensor:
    net.frozen.weight.requires_grad = True
    return net.frozen(h)


REFUSED: dict[str, tuple[str, Change]] = {
    "a mode": ("TorchDispatchMode", in_mode),
    "saved tensors": ("saved_tensors_hooks", saved_coarsely),
    "data of an output": ("assigns to .data", data_of_output),
    "data of a parameter": ("assigns to .data", data_of_parameter),
    "data and back": ("assigns to .data", data_and_back),
    "parameters of a vector": ("assigns to .data", from_a_vector),
    "a hook on a node": ("a hook on gradients", hooked_node),
    "a hook on the node before": ("a hook on gradients", hooked_deeper),
    "frozen in between": ("changes requires_grad of a parameter", frozen_in_between),
    "thawed": ("changes requires_grad of a parameter", thawed),
    "a subclass": ("a tensor of a class of its own", lambda net, h: h.as_subclass(Named).tanh()),
}


def kept_on_the_host(net: Net, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.sin(h) ** 2


def by_kind(net: Net, h: Tensor) -> Tensor:
    kinds = isinstance(net.last.weight, nn.Parameter), isinstance(h, nn.Parameter)
    return h * (2 if kinds == (True, False) else 3)


def by_node(net: Net, h: Tensor) -> Tensor:
    named = h.grad_fn is not None and type(h.grad_fn).__name__ == "AddmmBackward0"
    return h * (2 if named and isinstance(h.grad_fn, torch.autograd.graph.Node) else 3)


def on_a_copy(net: Net, h: Tensor) -> Tensor:
    found: Tensor = copy.deepcopy(net.last)(h)
    return found


def set_again(net: Net, h: Tensor) -> Tensor:
    net.last.requires_grad_(True)
    net.frozen.requires_grad_(False)
    net.last.weight = net.last.weight
    return net.frozen(h) + h.detach().requires_grad_()


SAME: dict[str, Change] = {
    "saved on the host": kept_on_the_host,
    "by the kind of a tensor": by_kind,
    "by the name of a node": by_node,
    "a parameter by its name": lambda net, h: F.linear(h, net.get_parameter("last.weight")),
    "a copy of a module": on_a_copy,
    "set to what it is": set_again,
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=draw)
    return x, y


BATCHES = [batch(seed) for seed in range(3)]


@one_of(3)
@pytest.mark.parametrize(("message", "change"), REFUSED.values(), ids=REFUSED)
def test_what_a_captured_step_would_not_repeat_is_refused(message: str, change: Change) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        rehearse(Net(change), F.mse_loss, None, BATCHES[:1], optimizer=SGD)

    assert "test_autograd_machinery.py" in str(raised.value)


@one_of(2)
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_rest_is_as_in_eager_training(change: Change) -> None:
    model = Net(change)
    trained = [one for one in model.parameters() if one.requires_grad]
    losses = plain_losses(SGD(trained), BATCHES, lambda x, y: F.mse_loss(model(x), y))

    found = rehearse(Net(change), F.mse_loss, None, BATCHES, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in model.named_parameters():
        if wanted.requires_grad:
            torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-10, atol=1e-12)
