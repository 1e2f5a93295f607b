"""What regions give each other has whatever layout; what they do with it is what was written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import annotate, rehearse
from piper.capture import capture
from piper.names import F
from piper.strategies import BUILDERS

aten = torch.ops.aten
Layer = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Two(nn.Module):
    """A layer in each region, and something done with it before and after the border."""

    def __init__(self, before: Layer, after: Layer) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.before(self.first(x))
        with annotate("PP"):
            return self.last(self.after(x))


def attention(x: Tensor) -> Tensor:
    heads = x.view(-1, 3, 1, 2).transpose(1, 2)  # three tokens of one head, for each row
    return functional.scaled_dot_product_attention(heads, heads, heads)


def channels_last(x: Tensor) -> Tensor:
    return x.view(-1, 2, 3, 1).to(memory_format=torch.channels_last) * 2


LAYERS: dict[str, tuple[Layer, Layer]] = {
    "transposed": (lambda x: torch.relu(x.t()), lambda x: x.t().view(-1).view(-1, 6)),
    "transposed, through an operator": (lambda x: x.t(), lambda x: x.tanh().t().reshape(-1, 6)),
    "attention": (attention, lambda x: x.transpose(1, 2).reshape(-1, 6)),
    "channels last": (channels_last, lambda x: x.permute(0, 2, 3, 1).flatten(1)),
    "strides": (lambda x: x.exp().t(), lambda x: torch.as_strided(x, (x.shape[1], 6), (6, 1))),
    "given back": (lambda x: (x * 2).t(), lambda x: x.t()),
    "no matter": (lambda x: torch.relu(x.t()), lambda x: x.t() + 1.0),
}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    rand = partial(torch.randn, 8, 6, generator=draw, dtype=torch.float64)
    return [(rand(), rand()) for _ in range(3)]


@one_of(2)
@pytest.mark.parametrize("schedule", every(2, ["zb-h1", "1f1b"]))
@pytest.mark.parametrize(("before", "after"), every(2, LAYERS.values(), LAYERS))
def test_regions_train_as_the_whole_model_does(before: Layer, after: Layer, schedule: str) -> None:
    assert_trains(partial(Two, before, after), functional.mse_loss, schedule)


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.huber_loss, functional.smooth_l1_loss]
)
def test_a_loss_may_lay_out_its_gradient_otherwise_than_it_was_traced(loss: Loss) -> None:
    """As these do of an output that is not contiguous."""

    def of_turned(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unflatten(1, (2, 3)).transpose(1, 2), target.view(-1, 3, 2))

    assert_trains(partial(Two, torch.tanh, torch.relu), of_turned, "1f1b")


def assert_trains(make: Callable[[], nn.Module], loss_fn: Loss, schedule: str) -> None:
    model = make()
    optimizer = SGD(model.parameters())
    losses = plain_losses(optimizer, data(), lambda x, y: loss_fn(model(x), y))

    strategy = BUILDERS[schedule](pp=2, microbatches=2)
    found = rehearse(make(), loss_fn, strategy, data(), optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach())


@pytest.mark.parametrize(("name", "copies"), [("no matter", 0), ("transposed", 1)])
def test_nothing_is_copied_without_need(name: str, copies: int) -> None:
    captured = capture(Two(*LAYERS[name]), functional.mse_loss, data()[0])

    last = captured.model.regions[-1]
    graph = captured.kernels.graphs[last.code][F].graph
    assert len(graph.find_nodes(op="call_function", target=aten.clone.default)) == copies
