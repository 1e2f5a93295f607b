"""Equal masks choose equally many elements. Others need not, and must not be taken for equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.torch_private import new_fake_mode
from piper.capture.trace.replaced.calls import ReplacedCalls
from piper.capture.tracing_private import trace_forward
from piper.errors import PiperError

Masks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def written(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first one chooses as it was, and is written to before the second is made."""
    mask = y > 0
    size = x[mask]
    mask.logical_not_()
    return size, x[y > 0]


def in_autocast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    one = x[(y @ y.T).diagonal() > 0]
    with torch.autocast("cpu", torch.bfloat16):
        return one, x[(y @ y.T).diagonal() > 0]


EQUAL: dict[str, Masks] = {
    "one": lambda x, y: (lambda m: (x[m], y[m]))(y > 0),
    "computed twice": lambda x, y: (x[y > 0], y[y > 0]),
    "of many steps": lambda x, y: (
        x[(y.exp() - 1).abs().sum(1) > 2],
        y[(y.exp() - 1).abs().sum(1) > 2],
    ),
    "masked_select": lambda x, y: (x.masked_select(y > 0), torch.masked_select(y, y > 0)),
    "broadcast": lambda x, y: (x.masked_select(y[:, :1] > 0), y.masked_select(y[:, :1] > 0)),
    "numbers": lambda x, y: (torch.where(y > 0)[0], (y > 0).nonzero(as_tuple=True)[1]),
    "written alike": lambda x, y: (
        x[(y > 0).clone().logical_not_()],
        y[(y > 0).clone().logical_not_()],
    ),
    "beside other indices": lambda x, y: (x[y[:, 0] > 0, 1], y[y[:, 0] > 0, 0]),
}
OTHER: dict[str, Masks] = {
    "above and below": lambda x, y: (x[y > 0], y[y < 0]),
    "another number": lambda x, y: (x[y > 0], x[y > 1]),
    "another tensor": lambda x, y: (x[y > 0], x[x > 0]),
    "negated": lambda x, y: (x.masked_select(y > 0), x.masked_select(~(y > 0))),
    "random": lambda x, y: (x[torch.rand_like(x) > 0.5], x[torch.rand_like(x) > 0.5]),
    "written": written,
    "in autocast": in_autocast,
}


def sizes(masks: Masks) -> tuple[str, str]:
    """Of what two masks choose, in a trace."""
    found: list[str] = []

    def traced(x: Tensor, y: Tensor) -> list[Tensor]:
        pair = masks(x, y)
        found.extend(str(one.shape[0]) for one in pair)
        return list(pair)

    with new_fake_mode(), ReplacedCalls():
        trace_forward(traced, torch.empty(4, 4), torch.empty(4, 4))
    return found[0], found[1]


@pytest.mark.parametrize("name", EQUAL)
def test_equal_masks_choose_equally_many(name: str) -> None:
    one, other = sizes(EQUAL[name])

    assert one == other


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_need_not(name: str) -> None:
    one, other = sizes(OTHER[name])

    assert one != other


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_select": lambda o, y: F.mse_loss(o.masked_select(y > 0), y.masked_select(y > 0)),
    "index": lambda o, y: F.smooth_l1_loss(o[y > 0], y[y > 0]),
    "rows by where": lambda o, y: F.mse_loss(
        o[torch.where(y[:, 0] > 0)[0]], y[torch.where(y[:, 0] > 0)[0]]
    ),
    "classes of some rows": lambda o, y: (
        F.cross_entropy(o[y[:, 0] > 0], y.argmax(1)[y[:, 0] > 0], reduction="sum")
        / o[y[:, 0] > 0].shape[0]
    ),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """In the second, one microbatch chooses nothing."""
    draw = torch.Generator().manual_seed(0)
    made = torch.randn(3, 2, 8, 4, dtype=torch.float64, generator=draw)
    made[1, 1, :4] = -made[1, 1, :4].abs()
    return [(x, y) for x, y in made]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


class OwnLoss(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = model(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.inner(x), y)


OWN = ("masked_select", "index")  # sizes of the others do not say that both inputs are cut
CASES = [*((name, False) for name in LOSSES), *((name, True) for name in OWN)]


@pytest.mark.parametrize(("name", "own"), every(3, CASES))
def test_losses_of_chosen_elements_train_as_on_the_whole_batch(name: str, own: bool) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = plain_losses(optimizer, batches(), lambda x, y: LOSSES[name](plain(x), y))

    trained, loss_fn = (OwnLoss(LOSSES[name]), None) if own else (model(), LOSSES[name])
    strategy = [Place(where(), [0]), Split("MB", 2)]
    found = rehearse(trained, loss_fn, strategy, batches(), optimizer=sgd)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for key, one in plain.named_parameters():
        mine = found.parameters[f"inner.{key}" if own else key]
        torch.testing.assert_close(mine, one.detach(), rtol=1e-12, atol=1e-13)


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)  # type: ignore[arg-type]


def test_sizes_that_may_differ_are_refused() -> None:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(o[y > 0], y[y < 0])

    with pytest.raises(PiperError, match="needs the value of a tensor"):
        rehearse(model(), loss, [Place(where(), [0])], batches()[:1])
