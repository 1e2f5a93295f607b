"""Higher-order operators: what all rows together decide is warned of, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional as F

from piper import Place, Split, rehearse, where

SGD = partial(torch.optim.SGD, lr=0.1)
Use = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a parameter, the input and the output


def shrunk(go_on: Callable[[Tensor, Tensor], Tensor]) -> Use:
    def use(_: Tensor, x: Tensor, h: Tensor) -> Tensor:
        start = torch.tensor(0), h.detach()
        return while_loop(go_on, lambda i, h: (i + 1, 0.9 * h), start)[1] + h  # type: ignore[no-any-return]

    return use


def added(dim: int) -> Use:
    def use(_: Tensor, x: Tensor, h: Tensor) -> Tensor:
        first = h.new_zeros(h.shape[1 - dim])
        return scan(lambda c, a: (c + a, c + a), first, h, dim=dim)[1]  # type: ignore[no-any-return]

    return use


MEETING: dict[str, Use] = {
    "cond": lambda _, x, h: torch.cond(x.sum() > 0, lambda a: 2 * a, lambda a: 1 * a, (h,)),
    "inside": lambda b, _, h: torch.cond(b > 0, lambda a: a - a.mean(0), lambda a: 1 * a, (h,)),
    "while": shrunk(lambda i, h: (i < 5) & (h.norm() > 2.0)),
    "scan": added(0),
}
APART: dict[str, Use] = {
    "cond": lambda b, _, h: torch.cond(b > 0, lambda a: 2 * a, lambda a: 1 * a, (h,)),
    "while": shrunk(lambda i, h: i < 5),
    "scan": added(1),
}


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate, self.use = nn.Linear(6, 3), nn.Parameter(torch.ones(())), use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.gate, x, self.layer(x))


def trained(model: nn.Module) -> tuple[float, float]:
    """The loss, and that of plain PyTorch, which runs afterwards, too."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, n, dtype=torch.float64, generator=draw) for n in (6, 3))
    strategy = [Place(where(), [0]), Split("MB", 2)]
    found = rehearse(model, F.mse_loss, strategy, [(x, y)], optimizer=SGD)
    return found.losses[0], F.mse_loss(model(x), y).item()


@one_of(2)
@pytest.mark.parametrize("use", every(2, MEETING.values(), MEETING))
def test_what_all_rows_decide_is_warned_of(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    trained(Net(use))

    assert "rows of the batch meet at test_branches_of_rows.py" in caplog.text


@one_of(2)
@pytest.mark.parametrize("use", every(2, APART.values(), APART))
def test_what_each_row_decides_is_not(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    found, wanted = trained(Net(use))

    assert found == pytest.approx(wanted, rel=1e-12)
    assert "piper" not in {one.name for one in caplog.records if one.levelname == "WARNING"}
