"""Layer drop: a random number decides in Python which layers run, for all rows of a step.

The reference is a plain loop on the whole batch that decides by the documented numbers. A layer
that it drops has a gradient of zero, as under `zero_grad(set_to_none=False)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from draws import drawn, draws, every
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Remat, Replicate, Split, rehearse, where
from piper.capture import capture
from piper.capture.kernels.random_operators import uniform
from piper.errors import CaptureError
from piper.strategies import BUILDERS

P, WIDTH, STEPS = 0.4, 4, 4
Rand = Callable[..., Tensor]
Form = Callable[["Net", Tensor], Tensor]


def skipped(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        if net.training and net.rand([]) < P:
            continue
        x = x + torch.tanh(layer(x))
    return x


def flagged(net: Net, x: Tensor) -> Tensor:
    """As in wav2vec2: with scaling, and a decision that is kept in a variable."""
    for layer in net.layers:
        drop = net.training and net.rand([]) < P
        if not drop:
            x = x + torch.tanh(layer(x)) / (1 - P)
    return layer(x)


def kept(net: Net, x: Tensor) -> Tensor:
    """As in torchaudio: a number of one element, and layers that run if it is large."""
    for layer in net.layers:
        if net.rand(1).item() >= P:
            x = torch.tanh(layer(x))
    return x.flip(1)


def replaced(net: Net, x: Tensor) -> Tensor:
    """Both ways compute, with the same parameters and with constants."""
    for layer in net.layers:
        if net.rand([]) < P:
            x = x.flip(1) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
            x = functional.linear(x, layer.weight.t())
        else:
            x = torch.tanh(layer(x))
    return x


def collected(net: Net, x: Tensor) -> Tensor:
    """All hidden states are used at the end."""
    states = [x]
    for layer in net.layers:
        x = x if net.rand([]) < P else torch.sin(layer(x))
        states.append(x)
    return torch.stack(states).mean(0) * states[1]


def halves(net: Net, x: Tensor) -> Tensor:
    """Two decisions in each layer."""
    for layer in net.layers:
        if net.rand([]) >= P:
            x = x + torch.tanh(layer(x))
        if net.rand([]) >= P:
            x = x + torch.sin(layer(x))
    return x


def ahead(net: Net, x: Tensor) -> Tensor:
    """All numbers are drawn before the first layer."""
    drops = [net.rand([]) < P for _ in net.layers]
    for drop, layer in zip(drops, net.layers, strict=True):
        x = x if drop else layer(torch.tanh(x))
    return x


def tied(net: Net, x: Tensor) -> Tensor:
    """One layer, called again and again."""
    for _ in range(3):
        x = torch.cos(x) if net.rand([]) < P else net.layers[0](x)
    return net.layers[2](torch.sin(net.layers[1](x)))


def remembered(net: Net, x: Tensor) -> Tensor:
    """What the second decision selects depends on the first."""
    other = torch.sin(x)
    if net.rand([]) < P:
        other = torch.cos(x)
    x = net.layers[0](x)
    if net.rand([]) < P:
        x = other
    return net.layers[2](net.layers[1](x))


FORMS: tuple[Form, ...] = (
    skipped, flagged, kept, replaced, collected, halves, ahead, tied, remembered,
)  # fmt: skip
OPTIMIZERS = (
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
)
STRATEGIES: tuple[Any, ...] = (
    BUILDERS["1f1b"](pp=2, microbatches=4),
    [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3), Split("MB", 2)],
    [Place(where(), [0]), Remat(where()), Split("MB", 2, sizes=[1, 3])],
    BUILDERS["zbv"](pp=1, microbatches=2, dp=2, zero=1),
)


class Net(nn.Module):
    def __init__(self, form: Form, rand: Rand = torch.rand, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        if form is normalized:
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers))
        self.form, self.rand = form, rand
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    one = partial(torch.randn, 8, WIDTH, generator=draw, dtype=torch.float64)
    return [(one(), one()) for _ in range(STEPS)]


def plainly(form: Form, optimizer: Any) -> tuple[list[float], nn.Module]:
    """Decides by the number of the step and of the decision."""
    numbers, seed = count(), torch.zeros(4, dtype=torch.int64)
    seed[2] = 1

    def documented(*shape: Any) -> Tensor:
        return uniform(seed, next(numbers), [], torch.float32)

    model, losses = Net(form, documented), []
    made = optimizer(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step, (x, y) in enumerate(data()):
        seed[0], numbers = step, count()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses, model


def assert_trains_as_the_plain_loop(form: Form, optimizer: Any, strategy: Any) -> None:
    losses, model = plainly(form, optimizer)

    found = rehearse(Net(form), functional.mse_loss, strategy, data(), optimizer=optimizer)

    assert found.losses == pytest.approx(losses, rel=1e-10)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], tensor.detach(), rtol=1e-9, atol=1e-12)


@drawn
def test_layer_drop_trains_as_a_plain_loop_under_every_strategy() -> None:
    cases = [(form, strategy) for form in FORMS for strategy in STRATEGIES]
    for k in range(0, len(cases), draws(19, 1)):
        assert_trains_as_the_plain_loop(cases[k][0], OPTIMIZERS[k % 2], cases[k][1])


def captured(form: Form) -> Any:
    return capture(Net(form), functional.mse_loss, data()[0])


def refused(form: Form) -> str:
    with pytest.raises(CaptureError) as found:
        captured(form)
    return str(found.value)


def counted(net: Net, x: Tensor) -> Tensor:
    ran = 0
    for layer in net.layers:
        if net.rand([]) >= P:
            x, ran = x + layer(x), ran + 1
    return x / (1 + ran)


def listed(net: Net, x: Tensor) -> Tensor:
    sides = [x.mean()]
    for layer in net.layers:
        if net.rand([]) >= P:
            x = layer(x)
            sides.append(x.square().mean())
    return x + torch.stack(sides).sum()


def nested(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        if net.rand([]) >= P:
            x = layer(x) if net.rand([]) >= P else x
    return x


def few(net: Net, x: Tensor) -> Tensor:
    """At most one layer is dropped: no trace that drops one layer shows it."""
    dropped = False
    for layer in net.layers:
        number = net.rand([])
        if number < P and not dropped:
            dropped = True
            continue
        x = layer(x)
    return x


@pytest.mark.parametrize("form", every(2, [counted, listed, few, nested]))
def test_decisions_that_change_more_than_values_are_refused(form: Form) -> None:
    found = refused(form)

    assert "test_layer_drop.py:" in found
    assert "Python decides by a random number what to run" in found
    assert "config.layerdrop = 0.0" in found


def shortened(net: Net, x: Tensor) -> Tensor:
    y = x if net.rand([]) < P else x[:, :2]
    return net.layers[0](x) * y.sum()


def test_ways_of_different_shapes_are_refused() -> None:
    assert "values of different shapes or types" in refused(shortened)


def of_data(net: Net, x: Tensor) -> Tensor:
    number = net.rand([])
    number.view(1).mul_(x.mean())
    return x if number < P else net.layers[0](x)


def test_decisions_by_data_are_refused() -> None:
    assert "depends on the batch or on parameters" in refused(of_data)


def test_a_random_number_is_no_python_number() -> None:
    assert "leave out .item()" in refused(lambda net, x: x * net.rand([]).item())
    assert "needs the value of a tensor" in refused(lambda net, x: x + float(net.rand(1)))


def normalized(net: Net, x: Tensor) -> Tensor:
    for layer, norm in zip(net.layers, net.norms, strict=True):
        if net.rand([]) < P:
            continue
        x = x + norm(layer(x))
    return x


def test_buffers_of_dropped_layers_stay_as_they_are() -> None:
    losses, model = plainly(normalized, OPTIMIZERS[0])

    found = rehearse(
        Net(normalized), functional.mse_loss, [Place(where(), [0])], data(), optimizer=OPTIMIZERS[0]
    )

    assert found.losses == pytest.approx(losses, rel=1e-10)
    for name, tensor in model.named_buffers():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=1e-9, atol=1e-12)
    calls = [norm.num_batches_tracked.item() for norm in model.norms]
    assert 0 < sum(calls) < 3 * STEPS
