"""Writes in place that autograd does not see: gradients pass by them in eager training.

A trace would make them functions without a gradient, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import CaptureError

Change = Callable[[Tensor], Tensor]
ROWS, WIDTH = 6, 4
SGD = partial(torch.optim.SGD, lr=0.5)


def unseen(write: Callable[[Tensor], object]) -> Change:
    def change(h: Tensor) -> Tensor:
        with torch.no_grad():
            write(h)
        return h

    return change


def by_data(write: Callable[[Tensor], object], detached: Change) -> Change:
    def change(h: Tensor) -> Tensor:
        write(detached(h))
        return h

    return change


def set_first(h: Tensor) -> None:
    h[:, 0] = 0.0


def renormed(h: Tensor) -> Tensor:
    return h + F.embedding(torch.arange(WIDTH).repeat(ROWS)[:ROWS], h[:WIDTH] * 2, max_norm=0.5)


def each_part(h: Tensor) -> None:
    for part in h.chunk(2, -1):
        part.clamp_(-0.3, 0.3)


def each_row(h: Tensor) -> None:
    for row in h:
        row.mul_(0.5)


def view_lives(h: Tensor) -> Tensor:
    """The tensor that was detached is gone, a view of it with the history lives."""
    other, h = h.detach(), h.view(-1)
    other.clamp_(-0.3, 0.3)
    return h.view(ROWS, WIDTH)


def filled_later(h: Tensor) -> Tensor:
    filled = torch.zeros_like(h)
    other = filled.detach()
    filled.copy_(h)
    other.clamp_(-0.3, 0.3)
    return filled


def a_part_filled_later(h: Tensor) -> Tensor:
    filled = torch.zeros_like(h)
    first, other = filled[:, 0], filled.data
    filled[:, 1:] = h[:, 1:]
    with torch.no_grad():
        first.add_(1.0)
    other.mul_(0.5)
    return filled


def viewed_unseen(h: Tensor) -> Tensor:
    with torch.no_grad():
        part = h[:, 1:]
    part.mul_(0.5)
    return h


WRITES: dict[str, Callable[[Tensor], object]] = {
    "clamped": lambda h: h.clamp_(-0.3, 0.3),
    "scaled": lambda h: h.mul_(0.5),
    "rounded": lambda h: h.round_(),
    "copied": lambda h: h.copy_(h.round()),
    "an index": set_first,
    "a slice": lambda h: h[:, 1:].div_(3.0),
    "a view": lambda h: h.view(-1)[::2].zero_(),
    "masked": lambda h: h.masked_fill_(h > 0, 0.1),
    "by out": lambda h: torch.mul(h.detach(), 2, out=h),
    "for each": lambda h: torch._foreach_mul_([h], 0.5),
    "parts": each_part,
    "parts, for each": lambda h: torch._foreach_mul_(h.split(2, -1), 0.5),
    "columns": lambda h: h.unbind(1)[0].zero_(),
    "rows": each_row,
}
HIDDEN: dict[str, Change] = {
    **{f"no_grad, {name}": unseen(write) for name, write in WRITES.items()},
    **{
        f"data, {name}": by_data(write, lambda h: h.data)
        for name, write in WRITES.items()
        if name not in ("by out", "for each")
    },
    "detached": by_data(WRITES["clamped"], lambda h: h.detach()),
    "a detached slice": by_data(WRITES["scaled"], lambda h: h[1:].detach()),
    "an embedding's norm": renormed,
    "a view lives": view_lives,
    "filled later": filled_later,
    "a part filled later": a_part_filled_later,
    "viewed under no_grad": viewed_unseen,
}


COPIES: dict[str, Change] = {  # each of a view: operators that consist of others
    "contiguous": lambda h: h.t().contiguous().t(),
    "contiguous slice": lambda h: h[:, 1:].contiguous(),
    "reshape": lambda h: h.t().reshape(-1),
    "flatten": lambda h: h[:, 1:].flatten(),
    "to another type": lambda h: h.float().double(),
    "expanded": lambda h: h[:, :1].expand(-1, WIDTH).contiguous(),
    "index": lambda h: h[torch.arange(ROWS)],
    "chunk": lambda h: h.chunk(2, 1)[1].contiguous(),
    "diagonal": lambda h: h[:, :, None].diagonal(dim1=1, dim2=2).contiguous(),
    "memory format": lambda h: h.view(ROWS, WIDTH, 1, 1).contiguous(
        memory_format=torch.channels_last
    ),
}


def sum_of(part: Tensor, h: Tensor) -> Tensor:
    return h + part.sum() / part.numel()


def written(copy: Change, write: Callable[[Tensor], object]) -> Change:
    def change(h: Tensor) -> Tensor:
        part = copy(h)
        write(part)
        return sum_of(part * part, h)

    return change


HIDDEN |= {
    f"detached {name}": written(copy, lambda part: part.detach().mul_(3.0))
    for name, copy in COPIES.items()
} | {
    f"no_grad, {name}": written(copy, unseen(lambda part: part.add_(1.0)))
    for name, copy in COPIES.items()
}


def own_copy(h: Tensor) -> Tensor:
    other = h.detach().clone()
    other.mul_(2)
    return h + other


def of_another(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean(-1, keepdim=True)
        scale.clamp_(min=0.5)
    return h / scale


def only_detached(h: Tensor) -> Tensor:
    h = h.detach()
    h.mul_(2)
    return h


def new_tensor(h: Tensor) -> Tensor:
    other = torch.zeros_like(h)
    with torch.no_grad():
        other.copy_(h)
    other[:, 0] = 1.0
    return h * other


def written_by_a_view(h: Tensor) -> Tensor:
    filled = torch.zeros_like(h)
    first = filled[:, 0]
    first.copy_(h[:, 0] * 2)
    with torch.no_grad():
        scale = filled.mean()
    filled[:, 1:] = h[:, 1:]
    return filled * (1 + scale)


def read_after_a_write(h: Tensor) -> Tensor:
    first = h[:, 0]
    h.mul_(2.0)
    return torch.cat([first[:, None], h[:, 1:]], 1) * first.detach().mean()


def each_seen(h: Tensor) -> Tensor:
    h = h.clone()
    for k in range(WIDTH):
        h[:, k].mul_(k)
    return h


SEEN: dict[str, Change] = {
    "in place": lambda h: h.mul_(0.5).clamp_(-0.3, 0.3),
    "a slice": lambda h: h.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "a copy": own_copy,
    "a scale": of_another,
    "nothing but detached": only_detached,
    "a new tensor": new_tensor,
    "by a view": written_by_a_view,
    "read after a write": read_after_a_write,
    "each column": each_seen,
    "passed by": lambda h: h + (h.clamp(-0.3, 0.3) - h).detach(),
}
SEEN_COPIES = {
    name: written(copy, lambda part: part.mul_(2.0).relu_()) for name, copy in COPIES.items()
}
SEEN |= {"a contiguous copy": SEEN_COPIES.pop("contiguous")}


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.change(2 * self.first(x))))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=draw)
    return x, y


BATCHES = [batch(seed) for seed in range(3)]


@one_of(3)
@pytest.mark.parametrize("change", every(4, HIDDEN.values(), HIDDEN))
def test_a_write_that_autograd_does_not_see_is_refused(change: Change) -> None:
    with pytest.raises(CaptureError, match="writes in place to a tensor that has a gradient"):
        rehearse(Net(change), F.mse_loss, None, BATCHES[:1], optimizer=SGD)


@one_of(2)
@pytest.mark.parametrize(
    "change",
    [*every(3, SEEN.values(), SEEN), *every(4, SEEN_COPIES.values(), SEEN_COPIES)],
)
def test_other_writes_are_those_of_eager_training(change: Change) -> None:
    model = Net(change)
    losses = plain_losses(SGD(model.parameters()), BATCHES, lambda x, y: F.mse_loss(model(x), y))

    found = rehearse(Net(change), F.mse_loss, None, BATCHES, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-10, atol=1e-12)
