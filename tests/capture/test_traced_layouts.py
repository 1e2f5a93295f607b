"""Kernels that depend on how a tensor lies in memory, after those that the trace sees otherwise.

Tensors without values have other strides than real ones after the PRODUCERS here. The CONSUMERS
have several kernels or formulas, and torch chooses among them by strides, in the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper import rehearse
from piper.capture.kernels.traced_layout import as_traced

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WIDTH = 6
Function = Callable[[Tensor], Tensor]
ONES = torch.ones(WIDTH, WIDTH).double()
PRODUCERS: dict[str, Function] = {
    "copysign": lambda x: torch.copysign(x.mT, ONES),
    "a power of a number": lambda x: 2.0**x.mT,
    "logaddexp": lambda x: torch.logaddexp(x.mT, ONES),
    "rounded division": lambda x: x.mT + torch.div(x.mT, 0.3, rounding_mode="floor").detach(),
    "xlogy": lambda x: torch.xlogy(x.mT.exp(), ONES + 1),
    "a norm of layers": lambda x: functional.layer_norm(x.mT, (WIDTH,)),
    "a norm of batches": lambda x: functional.batch_norm(x.mT, None, None, training=True),
    "as it is": lambda x: x.mT,
}
CONSUMERS: dict[str, Function] = {
    "a determinant": lambda x: torch.linalg.det(x),
    "its logarithm": lambda x: torch.linalg.slogdet(x + 3 * torch.eye(WIDTH).double())[1],
    "an inverse": lambda x: torch.linalg.inv(x + 9 * torch.eye(WIDTH).double()),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x[:, None]] * 3),
    "attention across": lambda x: functional.scaled_dot_product_attention(*[x.mT[:, None]] * 3),
    "group norm": lambda x: functional.group_norm(x, 3),
    "group norm and back": lambda x: functional.group_norm(x, 3).mT,
    "windows": lambda x: x.unfold(2, 3, 2),
    "memory": lambda x: x.contiguous().as_strided((len(x), WIDTH), (WIDTH * WIDTH, 1)),
    "another shape": lambda x: x.reshape(len(x), 4, -1),
    "convolution": lambda x: functional.conv1d(x, torch.eye(WIDTH).double()[..., None]),
    "pooling": lambda x: functional.adaptive_max_pool1d(x, 2),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": functional.mse_loss,
    "huber": functional.huber_loss,
    "softplus": lambda o, y: functional.softplus(o - y).mean(),
    "hardtanh": lambda o, y: functional.hardtanh(o * y).mean(),
    "smooth": functional.smooth_l1_loss,
}


class Net(nn.Module):
    """One consumer after each of the producers."""

    def __init__(self, consume: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in PRODUCERS)
        self.consume = consume
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.layers, PRODUCERS.values(), strict=True)
        return torch.stack([self.consume(make(layer(x))) for layer, make in pairs], 1)


@one_of(12)
@pytest.mark.parametrize(
    ("name", "loss"),
    [(name, list(LOSSES)[k % len(LOSSES)]) for k, name in enumerate(CONSUMERS)]
    + [("group norm and back", name) for name in LOSSES],
)
def test_gradients_are_those_of_plain_pytorch(name: str, loss: str) -> None:
    draw = torch.Generator().manual_seed(1)
    model = Net(CONSUMERS[name])
    batches = []
    for _ in range(2):
        x = torch.randn(4, WIDTH, WIDTH, generator=draw).double()
        batches.append((x, torch.randn(model(x).shape, generator=draw).double()))
    optimizer = SGD(model.parameters())
    losses = []
    for x, wanted in batches:
        optimizer.zero_grad()
        found = LOSSES[loss](model(x), wanted)
        found.backward()
        optimizer.step()
        losses.append(found.item())

    run = rehearse(Net(CONSUMERS[name]), LOSSES[loss], None, batches, optimizer=SGD)

    assert run.losses == pytest.approx(losses, rel=1e-12)
    for key, parameter in model.named_parameters():
        given = run.parameters[key], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-8, atol=1e-11, msg=key)


Weighted = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, a parameter and a buffer


def by_memory(w: Tensor) -> Tensor:
    return (w if w.is_contiguous() else w.mT).view(-1)


MEMORY: dict[str, Weighted] = {
    "a parameter": lambda x, w, b: x @ w.as_strided((WIDTH, WIDTH), (WIDTH, 1)),
    "a parameter across": lambda x, w, b: x @ w.as_strided((WIDTH, WIDTH), (1, WIDTH)),
    "a buffer": lambda x, w, b: x @ w @ b.as_strided((WIDTH, WIDTH), (WIDTH, 1)),
    "a view of a parameter": lambda x, w, b: x @ w + by_memory(w)[:WIDTH],
    "a view of a buffer": lambda x, w, b: x @ w + by_memory(b)[:WIDTH],
    "a determinant": lambda x, w, b: x @ w * torch.linalg.det(w),
    "norms": lambda x, w, b: functional.group_norm(x @ w, 3, b[0], w[1]).mT,
    "attention": lambda x, w, b: (
        functional.scaled_dot_product_attention(*[(x @ w)[:, None]] * 3)[:, 0].mT
    ),
    "activations": lambda x, w, b: (x @ w).mT.contiguous().mT.as_strided(x.shape, (36, 6, 1)),
}


class Regions(nn.Module):
    """Two regions, each with a parameter and a buffer that lie in memory in either order."""

    def __init__(self, work: Weighted, moved: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "ab":
            w, b = (torch.randn(WIDTH, WIDTH).double() for _ in range(2))
            self.register_parameter(name, nn.Parameter(w.mT if moved else w))
            self.register_buffer(f"{name}_buffer", b.mT if moved else b)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.work(x, self.a, self.a_buffer)
        with piper.annotate("PP"):
            return self.work(x, self.b, self.b_buffer)


@one_of(16)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("moved", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("name", MEMORY)
def test_parameters_and_values_between_regions(name: str, moved: bool, pp: int) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = 4, WIDTH, WIDTH
    batches = [tuple(torch.randn(2, *shape, generator=draw).double()) for _ in range(2)]
    batches[1] = batches[1][0].mT.contiguous().mT, batches[1][1]  # a batch in another layout
    make = partial(Regions, MEMORY[name], moved)
    slow = partial(torch.optim.SGD, lr=1e-3)
    model = make()
    optimizer = slow(model.parameters())
    for x, wanted in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(x), wanted).backward()
        optimizer.step()

    strategy = piper.strategies.one_f_one_b(pp=pp, microbatches=2)
    run = rehearse(make(), functional.mse_loss, strategy, batches, optimizer=slow)

    for key, parameter in model.named_parameters():
        given = run.parameters[key], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    "strides", [(12, 4, 1), (4, 8, 1), (1, 2, 6), (12, None, 1), (1, 2, None)], ids=str
)
def test_only_the_layout_changes(strides: tuple[int | None, ...]) -> None:
    given = torch.randn(2, 3, 4)

    found = as_traced(given, strides)

    assert torch.equal(found, given)
    pairs = zip(found.stride(), strides, strict=True)
    assert all(wanted in (own, None) for own, wanted in pairs)


def test_what_lies_as_in_the_trace_is_not_copied() -> None:
    given = torch.randn(2, 1, 4)

    assert as_traced(given, (4, 99, 1)) is given  # of one row, the stride does not matter


def written(found: Tensor) -> Tensor:
    """Only if `flatten` is a view is `found` written to."""
    found = found + 0  # a derivative may need what was there
    found.flatten(1).mul_(2)
    return found.flatten(1)


def channels_last(x: Tensor) -> Tensor:
    return x.view(len(x), 2, 3, -1).contiguous(memory_format=torch.channels_last)


EAGER: dict[str, Function] = {
    **{name: make for name, make in PRODUCERS.items() if name != "as it is"},
    "logsigmoid": lambda x: functional.logsigmoid(x.mT),
    "rrelu": lambda x: functional.rrelu(x.mT),
    "nll": lambda x: functional.nll_loss(
        x.mT.log_softmax(1), torch.zeros(4, WIDTH).long(), reduction="none"
    )[..., None],
    "one hot": lambda x: functional.one_hot((x.mT > 0).long(), 2) * x[..., None],
    "a roll": lambda x: channels_last(x).roll(1, 2).permute(0, 2, 3, 1),
    "shuffled": lambda x: functional.channel_shuffle(channels_last(x), 2).permute(0, 2, 3, 1),
    "binary": lambda x: functional.binary_cross_entropy(
        x.mT.sigmoid(), torch.full((4, WIDTH, WIDTH), 0.5).double(), reduction="none"
    ),
}


class Alone(nn.Module):
    def __init__(self, make: Function, use: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make, self.use = nn.Linear(WIDTH, WIDTH).double(), make, use
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.make(self.layer(x)))


@one_of(12)
@pytest.mark.parametrize("use", [written, lambda x: x.view(len(x), -1)], ids=["written", "viewed"])
@pytest.mark.parametrize("name", EAGER)
def test_what_is_a_view_in_eager_training_is_one_here(name: str, use: Function) -> None:
    draw = torch.Generator().manual_seed(1)
    x, model = torch.randn(4, WIDTH, WIDTH, generator=draw).double(), Alone(EAGER[name], use)
    try:
        wanted = model(x)
    except RuntimeError:  # no view is possible in eager training, either
        return
    y = torch.randn(wanted.shape, generator=draw).double()
    loss = functional.mse_loss(wanted, y)
    loss.backward()

    found = rehearse(
        Alone(EAGER[name], use), functional.mse_loss, None, [(x, y)],
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip

    assert found.losses == pytest.approx([loss.item()], rel=1e-12)
    moved = model.layer.weight - model.layer.weight.grad
    torch.testing.assert_close(found.parameters["layer.weight"], moved.detach())
